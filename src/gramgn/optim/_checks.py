"""Which values of the hyper-parameters are allowed, and what to say of the others."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any


def check_number(
    name: str, value: Any, *, least: float, strict: bool = False, below: float = math.inf
) -> float:
    """Return ``value`` as a float if it is a finite number in range.

    Args:
        name: What the number is called.
        value: What was given.
        least: The lower bound.
        strict: Whether the lower bound itself is excluded.
        below: The upper bound, which is excluded.

    Raises:
        ValueError: It is no number, not finite or out of range.
    """
    bound = f"{'>' if strict else '>='} {least:g}" + (f" and < {below:g}" if below < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number {bound}, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or number < least or number >= below or (strict and number == least):
        raise ValueError(f"{name} must be a finite number {bound}, got {number!r}")
    return number


def check_whole(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` if it is a whole number of at least ``least``.

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is True or False.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return ``value`` if it is one of the choices.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def check_keys(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keys that nothing would read.

    Args:
        where: What they stand in.
        given: The keys.
        known: Those that are read.

    Raises:
        ValueError: One is unknown; the message holds the nearest and all known ones.
    """
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no {key!r}: {hint}Valid keys: {', '.join(sorted(known))}")
