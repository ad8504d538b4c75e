"""A prepared set on disk: files that are verified as a whole before anything uses them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramgn.data._files import sha256_of
from gramgn.data._manifest import Row, read_csv
from gramgn.errors import DataError

IMAGES, MANIFEST, UNUSED, META = "images.npy", "manifest.csv", "unused.csv", "meta.json"
FILES = (IMAGES, MANIFEST, UNUSED)
SUMMARY_KEYS = (
    "image_size",
    "channels",
    "resize",
    "split_seed",
    "settings",
    "counts",
    "targets",
    "pixels",
    "upscaled",
    "duplicates",
    "versions",
)


@dataclass(frozen=True)
class PreparedSet:
    """A verified prepared set.

    Attributes:
        images: uint8 ``[N, C, H, W]``, a read-only memory map.
        rows: ``[N]`` the manifest.
        meta: Content of ``meta.json``.
        folder: Where it lies.
    """

    images: NDArray[np.uint8]
    rows: list[Row]
    meta: dict[str, Any]
    folder: Path

    @property
    def targets(self) -> NDArray[np.float64]:
        """Targets ``[N]``."""
        return np.array([row.target for row in self.rows], dtype=np.float64)

    @property
    def split(self) -> NDArray[np.str_]:
        """Splits ``[N]``."""
        return np.array([row.split for row in self.rows], dtype="<U5")

    @property
    def keys(self) -> NDArray[np.str_]:
        """Keys ``[N]``."""
        return np.array([row.key for row in self.rows], dtype=np.str_)

    @property
    def kind(self) -> str:
        """``"real"`` or ``"synthetic"``."""
        return str(self.meta["kind"])

    @property
    def manifest_sha256(self) -> str:
        """Identity of samples, targets and split."""
        return str(self.meta["manifest_sha256"])

    @property
    def listing_sha256(self) -> str:
        """Hash of the raw files' names, sizes and labels."""
        return str(self.meta["listing_sha256"])

    @property
    def num_skipped(self) -> int:
        """Number of files that could not be decoded and were left out."""
        return len(self.meta["skipped"])

    @property
    def summary(self) -> dict[str, Any]:
        """The part of ``meta.json`` that is recorded with every run; no path of this machine is in it."""
        return {
            "prepared": self.folder.name,
            **{key: self.meta[key] for key in SUMMARY_KEYS},
            "unused": {entry["reason"]: entry["count"] for entry in self.meta["unused"]},
            "skipped": self.num_skipped,
        }


def prepared_exists(folder: Path) -> bool:
    """Say whether there is a prepared folder; whether it is whole is found out by `open_prepared`."""
    return folder.is_dir()


def open_prepared(folder: Path, *, rebuild: str) -> PreparedSet:
    """Verify a prepared set and map it.

    Args:
        folder: The prepared folder.
        rebuild: Command line that makes it anew, for messages.

    Raises:
        DataError: A file is missing, or differs from what was written.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        for name in FILES:
            expected = meta["files"][name]
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise ValueError(f"{name} has {size} bytes instead of {expected['bytes']}")
            if sha256_of(folder / name) != expected["sha256"]:
                raise ValueError(f"{name} differs from what was written")
        images = np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False)
        return PreparedSet(images, read_csv(folder / MANIFEST), meta, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"the prepared set {folder} is damaged ({what}). Make it anew with: {rebuild}"
        ) from error
