"""Predictions for image files, made into what the network was trained on by the data set's own decoder."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from gramgn.app.tools._images import NPZ, file_of
from gramgn.app.tools._trained import Trained
from gramgn.data import Decode, Decoded, Decoder, ImageDataset, Item, decode_all
from gramgn.errors import ConfigError, InputError
from gramgn.progress import track
from gramgn.records import write_atomic

COLUMNS = ("path", "prediction", "unit", "error")
HEADER = ",".join(COLUMNS)


@dataclass(frozen=True)
class Prediction:
    """What the network says of one image.

    Attributes:
        path: As it was given.
        value: In the data's unit; None where there is an error.
        error: Why there is no prediction, or empty.
    """

    path: str
    value: float | None
    error: str = ""


def predict_images(trained: Trained, paths: Sequence[str], *, workers: int | None = None) -> list[Prediction]:
    """Predict the target of every image; resize, channels and scaling are those of the training.

    An image gets the number that evaluation gives it. For the data set ``rotation`` an image is taken as it is,
    masked to the disk: how far it is turned is what is predicted.

    Args:
        trained: The network.
        paths: Images, as :func:`gramgn.app.tools.find_images` returns them.
        workers: Processes that decode; None for as many as there is work for.

    Raises:
        ConfigError: If the data set's class cannot turn a file into what the network sees.
    """
    dataset = trained.dataset()
    decoded = _decoded(trained, dataset, paths, workers)
    results = track(decoded, total=len(paths), label="predicting", unit="images")
    found: list[Prediction] = []
    while batch := list(islice(results, trained.settings.eval_batch_size)):
        readable = [result.pixels for _, result in batch if isinstance(result, Decoded)]
        values = iter(trained.predict(np.stack(readable), dataset.channels) if readable else ())
        found += [
            _prediction(path, float(next(values)))
            if isinstance(result, Decoded)
            else Prediction(path, None, result)
            for path, result in batch
        ]
    return found


def _prediction(path: str, value: float) -> Prediction:
    if math.isfinite(value):
        return Prediction(path, value)
    return Prediction(path, None, "the network's output is not a finite number")


def write_predictions(predictions: Sequence[Prediction], unit: str, out: Path) -> None:
    """Write a CSV file with the columns ``path,prediction,unit,error``, whole or not at all.

    Args:
        predictions: One row each.
        unit: Of the predictions.
        out: The file; one that holds predictions already is replaced.

    Raises:
        InputError: The folder is not there or cannot be written.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in predictions:
        # On Linux a file's name may be any bytes, which UTF-8 cannot hold: those are written as escapes.
        path = each.path.encode("utf-8", "backslashreplace").decode()
        value = "" if each.value is None else repr(each.value)
        writer.writerow((path, value, "" if each.value is None else unit, each.error))
    write_atomic(out, stream.getvalue())


def check_out(out: Path) -> None:
    """Refuse, before any work, a file that is not one of predictions, and a folder that is not there.

    Raises:
        InputError: With what to do instead.
    """
    if out.is_dir():
        raise InputError(f"out={out} is a folder; give a file, for example out={out / 'predictions.csv'}")
    if not out.parent.is_dir():
        raise InputError(f"out={out}: there is no folder {out.parent}; make it first")
    if out.exists() and not out.is_file():
        raise InputError(f"out={out} is no regular file; give a file")
    if out.exists():
        with out.open("rb") as file:
            first = file.readline(200).decode("utf-8", "replace").strip()
        if first != HEADER:
            raise InputError(
                f"out={out} is there and holds no predictions; it is left alone. Choose another file"
            )


def _decoded(
    trained: Trained, dataset: Any, paths: Sequence[str], workers: int | None
) -> Iterator[tuple[str, Decoded | str]]:
    """Decode images in order, files and arrays each with their own decoder."""
    for (is_special, _), group in groupby(paths, key=_kind):
        some = list(group)
        if is_special:
            yield from ((path, "is no regular file") for path in some)
            continue
        decoder = _decoder(trained, dataset)
        # Absolute: what a decoder of a user's own class joins to its root stays what it is.
        items = [Item(path, f"{Path.cwd() / path}", 0.0) for path in some]
        files = {file for file in map(file_of, some) if file.is_file()}
        num_bytes = sum(file.stat().st_size for file in files)
        for item, result in decode_all(decoder, items, num_bytes, workers):
            yield item.key, result if isinstance(result, Decoded) else result.removeprefix(f"{item.path}: ")


def _kind(path: str) -> tuple[bool, bool]:
    """Say whether a path is a pipe or a device, reading which may wait for ever, and whether it is in an array."""
    file = file_of(path)
    return file.exists() and not file.is_file(), f"{NPZ}#" in path


def _decoder(trained: Trained, dataset: Any) -> Decode:
    """Return what turns an image into the pixels ``[C, H, W]`` that evaluation sees."""
    if not isinstance(dataset, ImageDataset):
        raise ConfigError(
            f"the data set of this run, {trained.config['dataset']['_target_']}, does not say how an image file "
            "becomes what the network sees; derive it from gramgn.data.ImageDataset"
        )
    decoder = dataset.decoder(trained.run["dataset"]["image_size"])
    channels = len(trained.scaling.pixel_mean)
    return replace(decoder, channels=channels) if isinstance(decoder, Decoder) else decoder
