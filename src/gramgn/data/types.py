"""The records that pass between indexing, decoding, preparing and training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class RegressionData:
    """A prepared data set: `N` samples in memory or memory-mapped, with one real target per sample.

    Attributes:
        name: Name of the data set, e.g. `"rsna"`.
        kind: `"real"` or `"synthetic"`; results on synthetic data are always marked as such.
        unit: Unit of the targets: `"years"`, `"months"`, `"degrees"`, `"grade"`, `"digit"`,
            or `"1"` for a plain number.
        images: uint8 `[N, C, H, W]` as stored (`C` is 1 for grey), a read-only memory map,
            or an array in memory where `limit` chose some.
            Vector data and user-defined classes provide floating-point features `[N, ...]` instead.
        targets: float64 `[N]` in `unit`.
        split: `[N]` of `"train"`, `"val"` or `"test"`.
        keys: `[N]` stable names of the samples, the manifest's key.
        channels: Channels that the network sees; grey is repeated to it on the device.
        manifest_sha256: Identity of samples, targets and split (see `docs/data.md`).
        summary: Plain JSON values: counts, what was left out, how images were resized.
    """

    name: str
    kind: str
    unit: str
    images: NDArray[Any]
    targets: NDArray[np.float64]
    split: NDArray[np.str_]
    keys: NDArray[np.str_]
    channels: int
    manifest_sha256: str
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One usable sample of the raw data, found but not yet decoded.

    Attributes:
        key: Stable name, the same on every machine: AFAD's relative path, RSNA's id.
        path: Where the image is: relative to the root with `/`, or `file.npz#array/index`.
        target: The number to be predicted.
        group: Samples of one group (a person) stay on one side of the split; empty if there is none.
        sex: `"M"`, `"F"` or empty.
        official: Published split that is binding (`"train"`, `"val"`, `"test"`), or empty.
    """

    key: str
    path: str
    target: float
    group: str = ""
    sex: str = ""
    official: str = ""


@dataclass(frozen=True)
class Unused:
    """A file or label row that is not used, and why.

    Attributes:
        path: The file relative to the root, or the label table and row.
        reason: The same words for all cases of one kind, so that they can be counted.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Index:
    """The content of a raw folder.

    Attributes:
        items: The samples, sorted by key.
        unused: Everything else that was found.
        notes: Sentences for people, reported by prepare and recorded.
        facts: Plain JSON values recorded with the prepared set, e.g. which label tables were read.
    """

    items: list[Item]
    unused: list[Unused] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decoded:
    """One decoded sample.

    Attributes:
        pixels: uint8 `[C, H, W]`.
        sha256: Hash of the raw bytes: equal bytes never cross a split.
        width: Width of the original in pixels, upright.
        height: Height of the original in pixels, upright.
        mode: Pillow's name of the original's pixel format.
        note: What was done besides resizing, empty as a rule.
        brightest: Largest value of a 16-bit image; 0 for any other.
    """

    pixels: NDArray[np.uint8]
    sha256: str
    width: int
    height: int
    mode: str
    note: str = ""
    brightest: int = 0
