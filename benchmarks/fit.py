"""The cost of a step as a function of the batch size, t(b) = t0 + a b + c b^2 m, fitted to a sweep over b."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch


@dataclass(frozen=True)
class Fit:
    """The cost of a step as a function of b.

    Attributes:
        fixed_s: t0, seconds per step.
        linear_s: a, seconds per sample.
        square_s: c, seconds per multiply-add of the Gram product, of which there are b^2 m.
        num_params: m.
        misfit: The largest relative distance of a measured time from the fit.
    """

    fixed_s: float
    linear_s: float
    square_s: float
    num_params: int
    misfit: float

    def step_s(self, b: int) -> float:
        """Return t(b)."""
        return self.fixed_s + self.linear_s * b + self.square_s * b * b * self.num_params

    def square_share(self, b: int) -> float:
        """Return the share of the b^2 m term in t(b)."""
        return self.square_s * b * b * self.num_params / self.step_s(b)


def fit_cost(seconds: Mapping[int, float], num_params: int) -> Fit:
    """Fit t0, a, c >= 0 by least squares of the relative distances.

    Every choice of terms set to 0 is tried, and the best fit without a negative term is taken: with three terms
    this is the exact solution of the constrained problem.

    Args:
        seconds: Median seconds per step by b, at least one entry.
        num_params: m.
    """
    b = torch.tensor(list(seconds), dtype=torch.float64)
    t = torch.tensor(list(seconds.values()), dtype=torch.float64)
    terms = torch.stack((torch.ones_like(b), b, b * b * num_params), dim=1) / t[:, None]
    scale = terms.norm(dim=0)
    best, chosen = float("inf"), torch.zeros(3, dtype=torch.float64)
    for size in range(1, min(3, len(b)) + 1):
        for columns in combinations(range(3), size):
            kept = list(columns)
            system = terms[:, kept] / scale[kept]
            found = torch.linalg.lstsq(system, torch.ones(len(t), 1, dtype=torch.float64)).solution[:, 0]
            distance = float((system @ found - 1).norm())
            if bool((found >= 0).all()) and distance < best:
                best = distance
                chosen = torch.zeros(3, dtype=torch.float64)
                chosen[kept] = found / scale[kept]
    misfit = float((terms @ chosen - 1).abs().max())
    return Fit(float(chosen[0]), float(chosen[1]), float(chosen[2]), num_params, misfit)
