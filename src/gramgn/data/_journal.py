"""What an interrupted prepare leaves behind, so that the next one goes on where it stopped.

``pixels.u8`` grows by one image, ``journal.jsonl`` by one line for every decoded sample; the line carries a
checksum of the image. A line that is torn, or whose image is not whole, ends what is believed: everything
after it is cut off.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gramgn.data._files import write_text
from gramgn.data._types import Decoded, Item

Stamp = tuple[int, int]
"""Size in bytes and modification time in nanoseconds of the raw file: enough to see that it was replaced."""


@dataclass(frozen=True)
class Entry:
    """One journaled sample.

    Attributes:
        key: The item's key.
        path: The item's path.
        stamp: Size and modification time of the raw file when it was decoded.
        sha256: Hash of the raw bytes.
        width: Width of the original.
        height: Height of the original.
        mode: Pixel format of the original.
        note: The decoder's note.
        crc: CRC-32 of the pixels.
    """

    key: str
    path: str
    stamp: Stamp
    sha256: str
    width: int
    height: int
    mode: str
    note: str
    crc: int


class Journal:
    """The decoded samples so far: append to it, look up, read pixels back. Use as a context manager."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], header: dict[str, Any]) -> None:
        """Open the journal in ``folder`` or begin one.

        Args:
            folder: The work folder; created if it is not there.
            shape: ``(C, H, W)`` of every image.
            header: What all entries depend on, e.g. the decoder's version; a journal with another one is
                begun anew.
        """
        self.shape = shape
        self._num_bytes = int(np.prod(shape))
        self._rows: dict[str, tuple[int, Entry]] = {}
        self._pixels_path, self._lines_path = folder / "pixels.u8", folder / "journal.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._begin(folder / "header.json", json.dumps({**header, "shape": shape}, sort_keys=True))
        self._pixels = self._pixels_path.open("r+b")
        self._lines = self._lines_path.open("r+b")
        self.num_rows = self._replay()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pixels.close()
        self._lines.close()

    def find(self, item: Item, stamp: Stamp) -> Entry | None:
        """Return the entry of an item if its file is still the one that was decoded."""
        _, entry = self._rows.get(item.key, (0, None))
        return entry if entry and entry.stamp == stamp and entry.path == item.path else None

    def append(self, item: Item, stamp: Stamp, decoded: Decoded) -> Entry:
        """Add a decoded sample: its pixels first, so that no line stands for an image that is not there."""
        pixels = decoded.pixels.tobytes()
        about = (decoded.sha256, decoded.width, decoded.height, decoded.mode, decoded.note)
        entry = Entry(item.key, item.path, stamp, *about, zlib.crc32(pixels))
        self._pixels.write(pixels)
        self._pixels.flush()
        self._lines.write(json.dumps(vars(entry)).encode() + b"\n")
        self._lines.flush()
        self._rows[entry.key] = (self.num_rows, entry)
        self.num_rows += 1
        return entry

    def pixels(self) -> NDArray[np.uint8]:
        """Map the decoded images ``[rows, C, H, W]`` in the order in which they were appended."""
        return np.memmap(self._pixels_path, np.uint8, "r", shape=(self.num_rows, *self.shape))

    def entry(self, key: str) -> Entry:
        """Return the entry of a journaled key."""
        return self._rows[key][1]

    def row(self, key: str) -> int:
        """Return the row of a journaled key."""
        return self._rows[key][0]

    def _begin(self, header_path: Path, header: str) -> None:
        fits = header_path.is_file() and header_path.read_text(encoding="utf-8") == header
        if not fits or not self._pixels_path.is_file() or not self._lines_path.is_file():
            self._pixels_path.write_bytes(b"")
            self._lines_path.write_bytes(b"")
            write_text(header_path, header)

    def _replay(self) -> int:
        """Read what is whole, cut off the rest, and return the number of rows kept."""
        rows, end = 0, 0
        for line in self._lines_path.read_bytes().splitlines(keepends=True):
            entry = _parse(line)
            if entry is None or zlib.crc32(self._pixels.read(self._num_bytes)) != entry.crc:
                break
            self._rows[entry.key] = (rows, entry)
            rows, end = rows + 1, end + len(line)
        self._pixels.truncate(rows * self._num_bytes)
        self._pixels.seek(0, 2)
        self._lines.truncate(end)
        self._lines.seek(0, 2)
        return rows


def _parse(line: bytes) -> Entry | None:
    """Read one line; None if it is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        fields = json.loads(line)
        return Entry(**{**fields, "stamp": tuple(fields["stamp"])})
    except (ValueError, TypeError, KeyError):
        return None
