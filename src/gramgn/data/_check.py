"""Checks of option values and of items: what was given, what is allowed, what is nearest."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from gramgn.data._types import Item
from gramgn.errors import ConfigError, DataError, nearest

T = TypeVar("T")


def choice(option: str, given: T, allowed: Sequence[T]) -> T:
    """Return ``given`` if it is one of ``allowed``, else raise ConfigError."""
    if given in allowed and not isinstance(given, bool):
        return given
    hint = nearest(given, [str(value) for value in allowed]) if isinstance(given, str) else ""
    raise ConfigError(f"dataset.{option}={given}: allowed are {', '.join(map(str, allowed))}{hint}")


def integer(option: str, given: int, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Return ``given`` if it is an integer in the range, else raise ConfigError."""
    inside = isinstance(given, int) and not isinstance(given, bool) and given >= minimum
    if not inside or (maximum is not None and given > maximum):
        upper = "" if maximum is None else f", at most {maximum}"
        raise ConfigError(f"{option}={given}: must be an integer, at least {minimum}{upper}")
    return given


def number(option: str, given: float, *, minimum: float, maximum: float) -> float:
    """Return ``given`` as a float if it lies in the range, bounds included, else raise ConfigError."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not minimum <= given <= maximum:
        raise ConfigError(f"dataset.{option}={given}: must be a number from {minimum} to {maximum}")
    return float(given)


def name(given: str) -> str:
    """Return the name if it is safe as part of a folder's name, else raise ConfigError."""
    if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}", given):
        raise ConfigError(
            f"dataset.name={given!r}: must be 1 to 60 letters, digits, '_', '-' or '.', "
            f"beginning with a letter or digit"
        )
    return given


def folder_path(option: str, given: str | Path) -> Path:
    """Return an absolute path with ``~`` resolved; raise ConfigError for anything that is not a path."""
    if not isinstance(given, str | Path) or not str(given).strip():
        raise ConfigError(f"dataset.{option}={given!r}: must be a path, e.g. dataset.{option}=/data/images")
    return Path(given).expanduser().absolute()


def items(dataset: str, given: list[Item]) -> list[Item]:
    """Return the items sorted by key; raise DataError for a key used twice or a target that is not finite."""
    ordered = sorted(given, key=lambda item: item.key)
    for item, following in pairwise(ordered):
        if item.key == following.key:
            raise DataError(
                f"dataset {dataset}: {item.path} and {following.path} share the key {item.key!r}; rename one"
            )
    for item in ordered:
        if not math.isfinite(item.target):
            raise DataError(f"dataset {dataset}: {item.path} has the target {item.target}; must be finite")
    return ordered
