"""A prepared set on disk: one array of images, a manifest, and a record of how it was made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gramgn.errors import DataError
from gramgn.files import sha256_of

if TYPE_CHECKING:
    import pandas as pd

IMAGES, MANIFEST, UNUSED, META = "images.npy", "manifest.csv", "unused.csv", "meta.json"
FILES = (IMAGES, MANIFEST, UNUSED)
COLUMNS: dict[str, type] = {
    "key": str,
    "path": str,
    "sha256": str,
    "target": float,
    "group": str,
    "sex": str,
    "split": str,
    "width": int,
    "height": int,
    "mode": str,
    "note": str,
}
"""Columns of the manifest; one row per sample, sorted by key, the same on every machine for the same raw data."""
NOT_IDENTITY = ["path", "note"]
SUMMARY_KEYS = (
    "image_size",
    "channels",
    "resize",
    "split_seed",
    "settings",
    "counts",
    "targets",
    "upscaled",
    "duplicates",
    "versions",
)


class PreparedSet(NamedTuple):
    """A prepared set that was found whole."""

    images: NDArray[np.uint8]  # [N, C, H, W], a read-only memory map
    manifest: pd.DataFrame  # a row per sample, see `COLUMNS`
    meta: dict[str, Any]  # content of `meta.json`
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The part of `meta.json` that is recorded with every run; it holds no path of this machine."""
        return {
            "prepared": self.folder.name,
            **{key: self.meta[key] for key in SUMMARY_KEYS},
            "unused": {entry["reason"]: entry["count"] for entry in self.meta["unused"]},
            "skipped": len(self.meta["skipped"]),
        }


def table_text(table: pd.DataFrame) -> str:
    """Return a table as CSV; numbers are written so that reading returns them exactly."""
    return table.to_csv(index=False, lineterminator="\n")


def identity(manifest: pd.DataFrame) -> str:
    """Return the sha256 that identifies samples, targets and split.

    It is taken over the manifest without the columns `path` and `note`: neither the depth at which an archive was
    unpacked nor a remark of the decoder makes another data set.
    """
    return hashlib.sha256(table_text(manifest.drop(columns=NOT_IDENTITY)).encode()).hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """Return size, time and hash of a file, with which `open_prepared` compares it."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}


def open_prepared(folder: Path, *, rebuild: str, check: bool = False) -> PreparedSet:
    """Open a prepared set.

    A file of the recorded size and modification time is accepted; any other file, of a copied folder for instance, is
    hashed.

    Args:
        folder: The prepared folder.
        rebuild: Command line that rebuilds it, for messages.
        check: Hash every file whatever its time.

    Raises:
        DataError: A file is missing, or differs from what was written.
    """
    import pandas as pd

    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        for name in FILES:
            path, status, expected = folder / name, (folder / name).stat(), meta["files"][name]
            if status.st_size != expected["bytes"]:
                raise ValueError(f"{name} has {status.st_size} bytes instead of {expected['bytes']}")
            is_old = status.st_mtime_ns == expected.get("mtime_ns")
            if (check or not is_old) and sha256_of(path) != expected["sha256"]:
                raise ValueError(f"{name} differs from what was written")
        images = np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False)
        # Targets are read as text: only Python's own conversion returns on every version exactly what was written.
        manifest = pd.read_csv(folder / MANIFEST, dtype={**COLUMNS, "target": str}, na_filter=False)
        manifest["target"] = manifest["target"].map(float)
        return PreparedSet(images, manifest, meta, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"the prepared set {folder} is damaged ({what}). Rebuild it with: {rebuild}"
        ) from error
