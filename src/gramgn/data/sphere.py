"""Random points on the unit sphere with bounded targets: the data of the paper's theory (section 3.2)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gramgn.data.dataset import checked_name
from gramgn.data.vectors import VectorDataset
from gramgn.errors import checked_choice, checked_whole

TARGETS = ("wave", "random")


class Sphere(VectorDataset):
    """Points x drawn uniformly from the unit sphere in d dimensions, targets y in [-1, 1].

    Args:
        dim: d >= 2; 20 by default.
        num_points: n, the number of training points, 100 by default. The same seed gives the same first points for any
            n.
        num_val: Number of validation points, drawn independently; 50 by default.
        num_test: Number of test points, drawn independently; 50 by default.
        targets: `"wave"` (the default): y = sin(2 sqrt(d) <v, x>) with a unit vector v drawn from the seed, which a
            network can learn. `"random"`: y uniform on [-1, 1] for any x, which it can only memorise.
        seed: Seed of points and targets, 0 by default; the run's own seed decides the weights.
        name: Name used in records and figures.

    Raises:
        ConfigError: A value that is out of range.
    """

    kind: ClassVar[str] = "synthetic"
    unit: ClassVar[str] = "1"

    def __init__(
        self,
        *,
        dim: int = 20,
        num_points: int = 100,
        num_val: int = 50,
        num_test: int = 50,
        targets: Literal["wave", "random"] = "wave",
        seed: int = 0,
        name: str = "sphere",
    ) -> None:
        self.dim = checked_whole("dataset.dim", dim, minimum=2)
        self.num_points = checked_whole("dataset.num_points", num_points, minimum=1)
        self.num_val = checked_whole("dataset.num_val", num_val, minimum=1)
        self.num_test = checked_whole("dataset.num_test", num_test, minimum=1)
        self.targets = checked_choice("dataset.targets", targets, TARGETS)
        self.seed = checked_whole("dataset.seed", seed)
        self.name = checked_name(name)

    def settings(self) -> dict[str, Any]:
        """Return all options but the name."""
        names = ("dim", "num_points", "num_val", "num_test", "targets", "seed")
        return {name: getattr(self, name) for name in names}

    def samples(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_], NDArray[np.str_]]:
        """Return points, targets, splits and keys."""
        sizes = {"train": self.num_points, "val": self.num_val, "test": self.num_test}
        v = _unit_rows(np.random.default_rng([self.seed, len(sizes)]).standard_normal((1, self.dim)))[0]
        parts = [self._points(stream, size, v) for stream, size in enumerate(sizes.values())]
        split = np.array([name for name, size in sizes.items() for _ in range(size)])
        keys = np.array([f"{name}-{i:06d}" for name, size in sizes.items() for i in range(size)])
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), split, keys

    def _points(
        self, stream: int, size: int, v: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return points [size, d] and targets [size] of a split, from the split's own random numbers."""
        rng = np.random.default_rng([self.seed, stream])
        # Drawn row by row, so that a larger set begins with the smaller one.
        drawn = rng.standard_normal((size, self.dim + 1))
        x = _unit_rows(drawn[:, :-1])
        if self.targets == "wave":
            # Not x @ v: the rounding of a row in a matrix product may depend on the number of rows.
            return x, np.sin(2 * math.sqrt(self.dim) * (x * v).sum(axis=1))
        # The distribution function of the normal maps a draw to a uniform one.
        return x, np.array([math.erf(value / math.sqrt(2)) for value in drawn[:, -1]])


def _unit_rows(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit
