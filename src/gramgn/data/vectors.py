"""The base of data sets of vectors: created in memory at every start, with nothing on disk to prepare."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gramgn.data.types import SPLITS, RegressionData
from gramgn.errors import ConfigError

FORMAT = 1
DECIMALS = 6
"""Digits that count for a data set's identity: the last bits may differ between machines."""


class VectorDataset(ABC):
    """Vectors `[N, dim]` in the unit ball with one real target per vector.

    A subclass sets `name` and `dim` and creates the samples.
    """

    kind: ClassVar[str]
    """`"real"` or `"synthetic"`."""
    unit: ClassVar[str]
    """Unit of the targets."""
    name: str
    """Name used in records and figures."""
    dim: int
    """d, the number of entries of a vector."""

    @abstractmethod
    def samples(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_], NDArray[np.str_]]:
        """Return vectors `[N, dim]`, targets `[N]`, splits `[N]` and keys `[N]`."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the options that decide the samples, as plain values."""

    def check(self, image_size: int) -> None:  # noqa: B027 - most need nothing
        """Raise an InputError if the samples cannot be created."""

    def sample_shape(self, image_size: int) -> tuple[int, ...]:
        """Return the shape of one sample, whatever image size is asked for."""
        return (self.dim,)

    def prepare(self, image_size: int) -> Path:
        """Raise ConfigError: there is nothing to prepare."""
        raise ConfigError(
            f"dataset {self.name} is made in memory and needs no preparation: "
            f"python train.py dataset={self.name} model=two_layer"
        )

    def verify(self, image_size: int) -> Path:
        """Raise ConfigError, as `prepare` does."""
        return self.prepare(image_size)

    def load(self, image_size: int) -> RegressionData:
        """Return the samples; `image_size` has no meaning here."""
        vectors, targets, split, keys = self.samples()
        counts = {name: int((split == name).sum()) for name in SPLITS}
        digest = hashlib.sha256(json.dumps([FORMAT, self.name, self.settings()], sort_keys=True).encode())
        for array in (vectors, targets):
            # Adding 0 turns -0 into 0.
            digest.update((np.round(array, DECIMALS) + 0.0).astype("<f8").tobytes())
        digest.update("\n".join(split.tolist()).encode())
        return RegressionData(
            name=self.name,
            kind=self.kind,
            unit=self.unit,
            images=vectors,
            targets=targets,
            split=split,
            keys=keys,
            channels=1,
            manifest_sha256=digest.hexdigest(),
            summary={"format": FORMAT, **self.settings(), "dim": self.dim, "counts": counts},
        )
