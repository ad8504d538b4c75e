"""RetinaMNIST (MedMNIST v2): 1,600 fundus images of 28 x 28, grade 0 to 4, with published splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gramgn.data.dataset import ImageDataset
from gramgn.data.decode import array_path, image_arrays, read_npz
from gramgn.data.types import SPLITS, Index, Item
from gramgn.errors import DataError

FILE = "retinamnist.npz"
MD5 = "bd4c0672f1bba3e3a89f0e4e876791e4"
NATIVE_SIZE = 28


class RetinaMNIST(ImageDataset):
    """RetinaMNIST: 1,080 / 120 / 400 fundus images in the published splits; the target is the grade.

    It is always prepared at its native 28 x 28, whatever image size is asked for: larger images would hold no more
    information.

    Args:
        root: Folder with `retinamnist.npz`, or that file.
        options: See `ImageDataset`.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    unit: ClassVar[str] = "grade"
    natural_channels: ClassVar[int] = 3
    plausible: ClassVar[tuple[float, float]] = (0, 4)
    augmentations: ClassVar[tuple[str, ...]] = ("flip", "crop", "rotate")
    layout: ClassVar[str] = f"{FILE} (train_images, train_labels, val_..., test_...)"
    source: ClassVar[str] = "https://medmnist.com (CC BY 4.0), file retinamnist.npz of MedMNIST v2"

    def __init__(self, root: str | Path = "data/raw/retinamnist", **options: Any) -> None:
        options.setdefault("name", "retinamnist")
        super().__init__(root, **options)
        self._file = FILE
        if self.root.suffix == ".npz":
            self.root, self._file = self.root.parent, self.root.name

    def settings(self) -> dict[str, Any]:
        """Return the file's name."""
        return {"file": self._file}

    def size_for(self, image_size: int) -> int:
        """Return 28, the native size."""
        return NATIVE_SIZE

    def raw_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the file."""
        yield self._file, self.root / self._file

    def has_raw(self) -> bool:
        """Return whether the file is there."""
        return (self.root / self._file).is_file()

    def index(self) -> Index:
        """List the images of the three published splits.

        Raises:
            DataError: The file is damaged or lacks an array, or images and labels do not match.
        """
        path = self.root / self._file
        arrays, images = read_npz(path), image_arrays(path)
        items: list[Item] = []
        for split in SPLITS:
            name, labels = f"{split}_images", self._labels(path, arrays, f"{split}_labels")
            if name not in images or len(images[name]) != len(labels):
                raise DataError(f"{path}: {name} and {split}_labels must be there and equally long")
            items += [
                Item(f"{split}-{i:05d}", array_path(self._file, name, i), float(grade), official=split)
                for i, grade in enumerate(labels)
            ]
        md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        notes = [] if md5 == MD5 else [f"{FILE} is not the published file (md5 {md5}, published {MD5})"]
        return Index(items, [], notes, {"md5": md5, "published": md5 == MD5})

    @staticmethod
    def _labels(path: Path, arrays: dict[str, NDArray[Any]], name: str) -> NDArray[np.float64]:
        if name not in arrays or arrays[name].dtype.kind not in "iuf":
            raise DataError(f"{path}: no numbers '{name}'; arrays found: {', '.join(arrays)}")
        labels = arrays[name].reshape(-1).astype(np.float64)
        if not np.isfinite(labels).all():
            raise DataError(f"{path}: '{name}' holds values that are not finite")
        return labels
