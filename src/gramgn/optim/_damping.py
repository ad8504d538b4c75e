"""The two readings of alpha, and what values of the hyper-parameters are allowed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

CONVENTIONS = ("sum", "mean")


def alpha_in_sum(alpha: float, num_samples: int, convention: str) -> float:
    """Return alpha as it stands beside the sum J J^T in lam J J^T + alpha I.

    Args:
        alpha: The value as configured.
        num_samples: b, the samples in this batch (not rows: also for several outputs).
        convention: ``"sum"``: alpha as the paper prints its formula. ``"mean"``: alpha stands beside the mean
            J J^T / b, which goes with the paper's mean square loss, so alpha_sum = alpha * b.
    """
    return alpha * num_samples if convention == "mean" else alpha


def check_number(name: str, value: Any, *, least: float, strict: bool) -> float:
    """Return ``value`` as a float if it is a finite number in range.

    Args:
        name: What the number is called.
        value: What was given.
        least: The lower bound.
        strict: Whether the bound itself is excluded.

    Raises:
        ValueError: It is no number, not finite or too small.
    """
    bound = f"{'>' if strict else '>='} {least:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number {bound}, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or number < least or (strict and number == least):
        raise ValueError(f"{name} must be a finite number {bound}, got {number!r}")
    return number


def check_hyperparameters(group: dict[str, Any]) -> tuple[float, float, float]:
    """Return (lr, lam, alpha) of a parameter group if each is allowed: lr >= 0, lam > 0, alpha >= 0.

    They are checked at every step, because schedulers write into the group.

    Raises:
        ValueError: A value is out of range, or the damping convention is unknown.
    """
    if group["damping_convention"] not in CONVENTIONS:
        raise ValueError(f"damping_convention must be 'sum' or 'mean', got {group['damping_convention']!r}")
    return (
        check_number("lr", group["lr"], least=0.0, strict=False),
        check_number("lam", group["lam"], least=0.0, strict=True),
        check_number("alpha", group["alpha"], least=0.0, strict=False),
    )
