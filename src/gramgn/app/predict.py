"""Predictions for image files, turned into the network's input by the data set's own decoder."""

from __future__ import annotations

import csv
import glob
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from gramgn.app.trained import Trained
from gramgn.data import (
    IMAGE_SUFFIXES,
    Decode,
    Decoded,
    Decoder,
    ImageDataset,
    Item,
    array_path,
    decode_all,
    file_of,
    image_arrays,
    some,
    walk,
)
from gramgn.errors import ConfigError, DataError, InputError, counted
from gramgn.progress import say, track
from gramgn.records import write_atomic

NPZ = ".npz"
COLUMNS = ("path", "prediction", "unit", "error")


def find_images(given: Sequence[str]) -> list[str]:
    """Return the images named on a command line, in order, each once.

    A folder stands for all files in it, at any depth, that are images by their names; a pattern (`*`, `**`, `?`)
    for everything that matches; an `.npz` file for each image of its arrays. A file that is named is kept even if it
    does not exist: its prediction has the error.

    Args:
        given: Values of `images=`: each a path or pattern, or several separated by commas.

    Returns:
        Paths as they were written, or `file.npz#array/<number>`.

    Raises:
        ConfigError: No image is found at all.
    """
    found = dict.fromkeys(path for value in given for word in _words(value) for path in _expanded(word))
    if not any(Path(file_of(path)).exists() for path in found):
        raise ConfigError(
            f"images={','.join(given)}: no image found (relative paths are below {Path.cwd()}). Give files, a "
            f"pattern in quotes ('images=scans/*.png') or a folder with images ({', '.join(IMAGE_SUFFIXES)}, {NPZ})"
        )
    return list(found)


def predict_images(
    trained: Trained, paths: Sequence[str], out: Path, *, workers: int | None = None
) -> dict[str, str]:
    """Predict the target of every image and write a CSV file; resizing, channels and scaling are the training's.

    An image gets the number that evaluation gives it. For the data set `rotation` an image is taken as it is, masked to
    the disk: the predicted value is how far it is turned.

    Args:
        trained: The network.
        paths: Images, as `find_images` returns them.
        out: The file, with the columns `path,prediction,unit,error`; it is written whole or not at all, and
            replaced if it holds predictions.
        workers: Number of processes that decode; None for as many as there is work for.

    Returns:
        Why there is no prediction, by path, for the images that have none.

    Raises:
        ConfigError: The data set's class cannot turn a file into the network's input.
        InputError: The folder cannot be written.
    """
    decode, channels = _decoder(trained), trained.dataset().channels
    # Absolute: what a decoder of a user-defined class joins to its root stays what it is.
    items = [Item(path, f"{Path.cwd() / path}", 0.0) for path in paths]
    num_bytes = sum(file.stat().st_size for file in {Path(file_of(path)) for path in paths} if file.is_file())
    decoded = decode_all(decode, items, num_bytes, workers)
    results = iter(track(decoded, total=len(paths), label="predicting", unit="images"))
    stream, errors = io.StringIO(), {}
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    while batch := list(islice(results, trained.settings.eval_batch_size)):
        pixels = [result.pixels for _, result in batch if isinstance(result, Decoded)]
        values: Iterator[float] = iter(trained.predict(np.stack(pixels), channels).tolist() if pixels else [])
        for item, result in batch:
            if not isinstance(result, Decoded):
                errors[item.key] = result.removeprefix(f"{item.path}: ")
            elif math.isfinite(value := next(values)):
                writer.writerow((item.key, repr(value), trained.unit, ""))
                continue
            else:
                errors[item.key] = "the network's output is not a finite number"
            writer.writerow((item.key, "", "", errors[item.key]))
    write_atomic(out, stream.getvalue())
    return errors


def check_out(out: Path) -> None:
    """Reject, before any work, a file that does not hold predictions, and a folder that does not exist.

    Raises:
        InputError: With what to do instead.
    """
    if out.is_dir():
        raise InputError(f"out={out} is a folder; give a file, for example out={out / 'predictions.csv'}")
    if not out.parent.is_dir():
        raise InputError(f"out={out}: there is no folder {out.parent}; create it first")
    if out.exists() and not out.is_file():
        raise InputError(f"out={out} is not a regular file; give a file")
    if out.exists():
        with out.open("rb") as file:
            first = file.readline(200).decode("utf-8", "replace").strip()
        if first != ",".join(COLUMNS):
            raise InputError(
                f"out={out} is there and holds no predictions; it is left alone. Choose another file"
            )


def _decoder(trained: Trained) -> Decode:
    """Return what turns an image into the pixels `[C, H, W]` that evaluation sees."""
    dataset = trained.dataset()
    if not isinstance(dataset, ImageDataset):
        raise ConfigError(
            f"the data set of this run, {trained.config['dataset']['_target_']}, does not say how an image file "
            "becomes what the network sees; derive it from gramgn.data.ImageDataset"
        )
    decoder = dataset.decoder(trained.run["dataset"]["image_size"])
    channels = len(trained.scaling.pixel_mean)
    return replace(decoder, channels=channels) if isinstance(decoder, Decoder) else decoder


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
    others: list[str] = []
    if path.is_dir():
        for relative, inner, ignored in walk(path):
            if ignored:
                continue
            if relative.lower().endswith((*IMAGE_SUFFIXES, NPZ)):
                yield from _inside(inner)
            else:
                others.append(relative)
        if others:
            say(
                f"note: {counted(len(others), 'file')} in {path} left out, no image by its name: {some(others)}"
            )
    elif path.suffix.lower() == NPZ and path.is_file():
        yield from _in_npz(path)
    else:
        yield str(path)


def _in_npz(path: Path) -> Iterator[str]:
    try:
        arrays = image_arrays(path)
    except DataError:
        yield str(path)  # its prediction has the error, as for any other file that cannot be read
        return
    for name, array in arrays.items():
        yield from (array_path(str(path), name, number) for number in range(len(array)))
