"""Real handwritten digits of 8 x 8 pixels as vectors: scikit-learn's copy of the UCI test set, with its package."""

from __future__ import annotations

import hashlib
import importlib.util
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gramgn.data.dataset import checked_name, limited_rows
from gramgn.data.split import split_samples
from gramgn.data.vectors import VectorDataset
from gramgn.errors import DataError, checked_choice, checked_whole

NUM_IMAGES = 1797
NUM_PIXELS = 64
GREY_LEVELS = 16


class Digits(VectorDataset):
    """1,797 images of handwritten digits as vectors of 64 numbers in the unit ball; the target is the digit.

    All vectors are divided by the norm of the longest, so that 0 <= |x| <= 1. Source: Alpaydin and Kaynak 1998,
    "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (CC BY 4.0), its test set, as
    scikit-learn contains it.

    Args:
        dim: 64, the only dimension of the data.
        limit: Use at most this number of images, chosen by hash; all if None (the default).
        split_seed: Seed of the split rule, 80/10/10 (see `docs/data.md`); 0 by default.
        name: Name used in records and figures.

    Raises:
        ConfigError: A value that is out of range.
    """

    kind: ClassVar[str] = "real"
    unit: ClassVar[str] = "digit"

    def __init__(
        self, *, dim: int = NUM_PIXELS, limit: int | None = None, split_seed: int = 0, name: str = "digits"
    ) -> None:
        self.dim = checked_choice("dataset.dim", dim, (NUM_PIXELS,))
        self.limit = None if limit is None else checked_whole("dataset.limit", limit, minimum=1)
        self.split_seed = checked_whole("dataset.split_seed", split_seed)
        self.name = checked_name(name)

    def settings(self) -> dict[str, Any]:
        """Return all options but the name."""
        return {"limit": self.limit, "split_seed": self.split_seed}

    def check(self, image_size: int) -> None:
        """Raise DataError unless scikit-learn is installed, without importing it."""
        if importlib.util.find_spec("sklearn") is None:
            raise DataError(
                f"dataset {self.name}: the images come with scikit-learn, which is not installed. Install the "
                'extra: python -m pip install ".[theory]"; meanwhile, dataset=sphere needs nothing'
            )

    def samples(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_], NDArray[np.str_]]:
        """Return vectors, digits, splits and keys.

        Raises:
            DataError: scikit-learn is not installed, or holds other images.
        """
        self.check(0)
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        if pixels.shape != (NUM_IMAGES, self.dim) or not 0 <= pixels.min() <= pixels.max() <= GREY_LEVELS:
            raise DataError(
                f"dataset {self.name}: scikit-learn's digits are not the {NUM_IMAGES} images of 64 pixels from 0 "
                f"to {GREY_LEVELS} that are expected; found {list(pixels.shape)}. Reinstall scikit-learn"
            )
        x = pixels / np.linalg.norm(pixels, axis=1).max()
        keys = [f"{i:04d}" for i in range(NUM_IMAGES)]
        hashes = [hashlib.sha256(row.astype(np.uint8).tobytes()).hexdigest() for row in pixels]
        none = [""] * NUM_IMAGES
        split = np.array(split_samples(keys, none, hashes, none, self.split_seed))
        kept = limited_rows(np.array(keys), self.limit, self.split_seed)
        return x[kept], labels.astype(np.float64)[kept], split[kept], np.array(keys)[kept]
