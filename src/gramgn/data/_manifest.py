"""The manifest: one CSV row per sample, sorted by key, the same on every machine for the same raw data."""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import astuple, dataclass, fields
from pathlib import Path

IDENTITY_LEAVES_OUT = ("path", "note")


@dataclass(frozen=True)
class Row:
    """One sample of a prepared set; the fields are the manifest's columns.

    Attributes:
        key: Stable name.
        path: Where the original lies, relative to the raw folder, with ``/``.
        sha256: Hash of the original's bytes.
        target: The target.
        group: Person, or empty.
        sex: ``"M"``, ``"F"`` or empty.
        split: ``"train"``, ``"val"`` or ``"test"``.
        width: Width of the original in pixels, upright.
        height: Height of the original in pixels, upright.
        mode: Pixel format of the original.
        note: What was done besides resizing, or what the decoder complained about.
    """

    key: str
    path: str
    sha256: str
    target: float
    group: str
    sex: str
    split: str
    width: int
    height: int
    mode: str
    note: str


COLUMNS = tuple(field.name for field in fields(Row))


def to_csv(rows: list[Row]) -> str:
    """Return the manifest's text; numbers are written so that they are read back exactly."""
    return _csv(rows, COLUMNS)


def identity(rows: list[Row]) -> str:
    """Return the sha256 that names samples, targets and split.

    It is taken over the manifest without the columns ``path`` and ``note``: how deep an archive was unpacked,
    or what a decoder's version has to say, does not make another data set.
    """
    kept = tuple(column for column in COLUMNS if column not in IDENTITY_LEAVES_OUT)
    return hashlib.sha256(_csv(rows, kept).encode()).hexdigest()


def read_csv(path: Path) -> list[Row]:
    """Read a manifest back.

    Raises:
        ValueError: The file is not a manifest.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream)
        if tuple(next(reader, ())) != COLUMNS:
            raise ValueError("the columns are not those of a manifest")
        return [_row(cells) for cells in reader]


def _row(cells: list[str]) -> Row:
    key, path, sha256, target, group, sex, split, width, height, mode, note = cells
    return Row(key, path, sha256, float(target), group, sex, split, int(width), int(height), mode, note)


def _csv(rows: list[Row], columns: tuple[str, ...]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    kept = [COLUMNS.index(column) for column in columns]
    for row in rows:
        cells = astuple(row)
        writer.writerow([cells[position] for position in kept])
    return stream.getvalue()
