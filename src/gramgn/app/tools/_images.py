"""Which image files ``images=`` means: files, patterns, folders, and arrays of ``.npz`` files."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gramgn.data import IMAGE_SUFFIXES, array_path, image_arrays, walk
from gramgn.errors import ConfigError, DataError

NPZ = ".npz"


def find_images(given: Sequence[str]) -> list[str]:
    """Return the images named on a command line, in order, each once.

    A folder means all files in it, at any depth, that are images by their names; a pattern (``*``, ``**``,
    ``?``) everything it matches; an ``.npz`` file each image of its arrays. A file that is named is taken as it
    is, also if it is not there: the prediction says so.

    Args:
        given: Values of ``images=``: each a path or pattern, or several with commas between.

    Returns:
        Paths as they were written, or ``file.npz#array/<number>``.

    Raises:
        ConfigError: Nothing is found at all.
    """
    found = dict.fromkeys(path for value in given for word in _words(value) for path in _expanded(word))
    if not any(file_of(path).exists() for path in found):
        raise ConfigError(
            f"images={','.join(given)}: no image found (relative paths are below {Path.cwd()}). Give files, a "
            f"pattern in quotes ('images=scans/*.png') or a folder with images ({', '.join(IMAGE_SUFFIXES)}, {NPZ})"
        )
    return list(found)


def file_of(path: str) -> Path:
    """Return the file that an image lies in: many images share an ``.npz`` file."""
    before, inside, _ = path.partition(f"{NPZ}#")
    return Path(f"{before}{NPZ}") if inside else Path(path)


def _words(value: str) -> Iterable[str]:
    if Path(value).exists():
        return [value]
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return [word.strip() for word in inner.split(",") if word.strip()]


def _expanded(word: str) -> Iterator[str]:
    path = Path(word).expanduser()
    if path.exists() or not set(word) & set("*?["):
        yield from _inside(path)
        return
    matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    for match in sorted(matches):
        yield from _inside(Path(match))


def _inside(path: Path) -> Iterator[str]:
    if path.is_dir():
        for relative, inner, ignored in walk(path):
            if not ignored and relative.lower().endswith((*IMAGE_SUFFIXES, NPZ)):
                yield from _inside(inner)
    elif path.suffix.lower() == NPZ and path.is_file():
        yield from _in_npz(path)
    else:
        yield str(path)


def _in_npz(path: Path) -> Iterator[str]:
    try:
        arrays = image_arrays(path)
    except DataError:
        yield str(path)  # told with its prediction, like any other file that cannot be read
        return
    for name, array in arrays.items():
        yield from (array_path(str(path), name, number) for number in range(len(array)))
