"""A prepared set on disk: one array of images, a manifest, and a record of how it was made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class PreparedSet:
    """A prepared set that was found whole.

    Attributes:
        images: uint8 `[N, C, H, W]`, a read-only memory map.
        manifest: A row per sample, see `COLUMNS`.
        meta: Content of `meta.json`.
        folder: Where it lies.
    """

    images: NDArray[np.uint8]
    manifest: pd.DataFrame
    meta: dict[str, Any]
    folder: Path

    @property
    def targets(self) -> NDArray[np.float64]:
        """Targets `[N]`."""
        return self.manifest["target"].to_numpy(np.float64)

    @property
    def split(self) -> NDArray[np.str_]:
        """Splits `[N]`."""
        return self.manifest["split"].to_numpy("<U5")

    @property
    def keys(self) -> NDArray[np.str_]:
        """Keys `[N]`."""
        return self.manifest["key"].to_numpy(np.str_)

    @property
    def num_skipped(self) -> int:
        """Number of files that could not be decoded and were left out."""
        return len(self.meta["skipped"])

    @property
    def summary(self) -> dict[str, Any]:
        """The part of `meta.json` that is recorded with every run; it holds no path of this machine."""
        return {
            "prepared": self.folder.name,
            **{key: self.meta[key] for key in SUMMARY_KEYS},
            "unused": {entry["reason"]: entry["count"] for entry in self.meta["unused"]},
            "skipped": self.num_skipped,
        }


def table_text(table: pd.DataFrame) -> str:
    """Return a table as CSV; numbers are written such that reading returns them exactly."""
    return table.to_csv(index=False, lineterminator="\n")


def identity(manifest: pd.DataFrame) -> str:
    """Return the sha256 that identifies samples, targets and split.

    It is taken over the manifest without the columns `path` and `note`: neither the depth at which an archive was
    unpacked nor a remark of the decoder makes another data set.
    """
    return hashlib.sha256(table_text(manifest.drop(columns=NOT_IDENTITY)).encode()).hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """Return what `open_prepared` compares a file with."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}


def open_prepared(folder: Path, *, rebuild: str, check: bool = False) -> PreparedSet:
    """Open a prepared set.

    A file of the recorded size and modification time is taken as it is; another one, of a copied folder for instance,
    is hashed.

    Args:
        folder: The prepared folder.
        rebuild: Command line that rebuilds it, for messages.
        check: Hash every file whatever its time.

    Raises:
        DataError: A file is missing, or differs from what was written.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        for name in FILES:
            _compare(folder / name, meta["files"][name], check)
        images = np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False)
        return PreparedSet(images, _read_manifest(folder / MANIFEST), meta, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"the prepared set {folder} is damaged ({what}). Rebuild it with: {rebuild}"
        ) from error


def _compare(path: Path, expected: dict[str, Any], check: bool) -> None:
    status = path.stat()
    if status.st_size != expected["bytes"]:
        raise ValueError(f"{path.name} has {status.st_size} bytes instead of {expected['bytes']}")
    is_old = status.st_mtime_ns == expected.get("mtime_ns")
    if (check or not is_old) and sha256_of(path) != expected["sha256"]:
        raise ValueError(f"{path.name} differs from what was written")


def _read_manifest(path: Path) -> pd.DataFrame:
    import pandas as pd

    # Targets are read as text: only Python's own conversion returns on every version exactly what was written.
    manifest = pd.read_csv(path, dtype={**COLUMNS, "target": str}, na_filter=False)
    if list(manifest.columns) != list(COLUMNS):
        raise ValueError("the columns are not those of a manifest")
    manifest["target"] = manifest["target"].map(float)
    return manifest
