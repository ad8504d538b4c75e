"""Listing raw folders: which files are ignored, which are there, and whether this project drew them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gramgn.errors import DataError

SYNTHETIC_MARKER = "synthetic.json"
HIDDEN = "system or hidden file"
"""Why a file is left out that is nobody's concern."""
IGNORED_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


def is_ignored(name: str) -> bool:
    """Return whether a file or folder belongs to the operating system: hidden ones, `Thumbs.db` and the like."""
    return name.startswith((".", "~$")) or name.lower() in IGNORED_NAMES


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries sorted by name; empty if there is no such folder.

    Raises:
        DataError: The folder cannot be listed, or a name in it is not text: on Linux it may be any bytes.
    """
    if not folder.is_dir():
        return []
    try:
        with os.scandir(folder) as scanned:
            found = sorted(scanned, key=lambda entry: entry.name)
        for entry in found:
            entry.name.encode()
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})") from error
    except UnicodeEncodeError as error:
        name = ascii(error.object)
        raise DataError(f"{folder}: the name {name} is not valid Unicode; rename or remove it") from error
    return found


def folders(folder: Path) -> list[Path]:
    """Return the folders directly inside, without ignored ones, sorted by name."""
    return [Path(entry.path) for entry in entries(folder) if entry.is_dir() and not is_ignored(entry.name)]


def walk(root: Path) -> Iterator[tuple[str, Path, bool]]:
    """Walk all files below `root`, links to folders included, each real folder once.

    Args:
        root: Folder to start from.

    Yields:
        Relative path with `/`, the path, and whether it is to be ignored. An ignored folder is yielded as one path,
        the marker of synthetic data not at all.
    """
    seen: set[tuple[int, int]] = set()

    def inside(folder: Path, prefix: str) -> Iterator[tuple[str, Path, bool]]:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        for entry in entries(folder):
            if entry.name == SYNTHETIC_MARKER:
                continue
            ignored = is_ignored(entry.name)
            if entry.is_dir() and not ignored:
                yield from inside(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}", Path(entry.path), ignored

    if root.is_dir():
        yield from inside(root, "")


def read_bytes(path: Path) -> bytes:
    """Return the content of a raw file.

    Raises:
        DataError: It cannot be read, is empty, or is something else than a file: opening a named pipe would never end.
    """
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: not a regular file; remove it")
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not raw:
        raise DataError(f"{path}: the file is empty")
    return raw


def is_synthetic(root: Path) -> bool:
    """Return whether the marker that drawing leaves is at `root`, up to 3 levels above or 2 levels below it."""
    below = folders(root)
    deeper = [inner for folder in below for inner in folders(folder)]
    return any((folder / SYNTHETIC_MARKER).is_file() for folder in (root, *root.parents[:3], *below, *deeper))


def describe_folder(folder: Path) -> str:
    """Describe the content of a folder in one line, for messages."""
    if not folder.exists():
        return "nothing: there is no such folder"
    if not folder.is_dir():
        return f"a file of {folder.stat().st_size} bytes, not a folder"
    found = entries(folder)
    names = {
        "folders": [f"{entry.name}/" for entry in found if entry.is_dir()],
        "files": [entry.name for entry in found if not entry.is_dir()],
    }
    parts = [f"{some(each)} ({len(each)} {what})" for what, each in names.items() if each]
    return " and ".join(parts) or "nothing: the folder is empty"


def some(names: list[str], num: int = 4) -> str:
    """Return the first names of a list, for messages."""
    return ", ".join(names[:num]) + (", ..." if len(names) > num else "")
