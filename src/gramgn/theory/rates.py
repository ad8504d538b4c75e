"""Rates out of a sequence of residual norms |f_t - y|: order, constant, contraction, exponents.

Plain Python without torch, so that figures can be drawn from records alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

FLOOR = 1e-11
"""Of residual norms: below it float64 rounding has a part in them."""


def orders(residuals: Sequence[float]) -> list[float]:
    """Return the order of convergence of each step that has one before it.

    From |r_t|, |r_(t+1)|, |r_(t+2)|: log(|r_(t+2)| / |r_(t+1)|) / log(|r_(t+1)| / |r_t|), which is p where
    |r_(t+1)| = C |r_t|^p; by Theorem 1, formula (5), p = 2.

    Args:
        residuals: |f_t - y| for t = 0, 1, ..., T; above 0.

    Returns:
        T - 1 orders, the first of step 2; nan where a residual is not finite and above 0, or did not change.
    """
    r = [float(value) for value in residuals]
    found = []
    for a, b, c in zip(r, r[1:], r[2:], strict=False):
        usable = all(math.isfinite(value) and value > 0 for value in (a, b, c)) and a != b
        found.append(math.log(c / b) / math.log(b / a) if usable else math.nan)
    return found


def last_order(residuals: Sequence[float], *, floor: float = FLOOR) -> float:
    """Return the order of the last step whose newest residual is above `floor`; the first step takes no part.

    The first step starts outside of the region where formula (5) is sharp, so its residuals count neither as old nor
    as new ones.

    Args:
        residuals: |f_t - y| for t = 0, 1, ..., T.
        floor: Residuals at or below it are rounding.

    Raises:
        ValueError: Fewer than three residuals after the first are above the floor.
    """
    kept = [float(value) for value in residuals[1:]]
    end = _first_outside(kept, floor)
    if end < 3:
        raise ValueError(
            f"an order needs three finite residuals above {floor:g} after the first step, and there are {end}: "
            "take more steps, a smaller width, or float64"
        )
    return orders(kept[:end])[-1]


def quadratic_constants(residuals: Sequence[float], *, floor: float = FLOOR) -> list[float]:
    """Return |r_(t+1)| / |r_t|^2 of each step with a newest residual above `floor`: C / sqrt M of formula (5).

    A step that began at 0 gives nan.
    """
    r = [float(value) for value in residuals]
    return [b / a**2 if a > 0 else math.nan for a, b in pairwise(r) if b > floor]


def contraction(residuals: Sequence[float], *, floor: float = FLOOR) -> float:
    """Return the contraction per epoch: the geometric mean over the second half of the epochs.

    The leading eigenvalues of A come in conjugate pairs, so that single epochs oscillate about rho(A).

    Args:
        residuals: |f - y| before the first epoch and after each.
        floor: From the first residual at or below it, or that is not finite, all are left out.

    Raises:
        ValueError: Fewer than two epochs are left.
    """
    r = [float(value) for value in residuals]
    r = r[: _first_outside(r, floor)]
    num_epochs = len(r) - 1
    if num_epochs < 2:
        raise ValueError(
            f"a contraction needs at least two epochs that end finite and above {floor:g}, got {max(num_epochs, 0)}"
        )
    half = num_epochs // 2
    return float((r[-1] / r[half]) ** (1 / (num_epochs - half)))


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of log(values) against log(sizes) by least squares, e.g. -1/2 for values ~ M^(-1/2).

    Raises:
        ValueError: Fewer than two different sizes, or an entry that is not finite and above 0.
    """
    numbers = [*sizes, *values]
    if len(sizes) != len(values) or len(set(sizes)) < 2 or not all(0 < v < math.inf for v in numbers):
        raise ValueError(
            "a slope needs as many values as sizes, two different sizes, and all of them finite and above 0"
        )
    return statistics.linear_regression([math.log(v) for v in sizes], [math.log(v) for v in values]).slope


def _first_outside(residuals: Sequence[float], floor: float) -> int:
    """Return the place of the first residual that is not finite and above `floor`; their number if all are."""
    outside = (t for t, value in enumerate(residuals) if not floor < value < math.inf)
    return next(outside, len(residuals))
