"""Errors that the user can fix: shown as one message, without a traceback, with exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """Bad configuration, data or input. The message names what was given, what is allowed and what to do next."""


class ConfigError(InputError):
    """A wrong key, choice, value or combination in the configuration."""


class DataError(InputError):
    """Raw or prepared data that is missing, damaged or not what its layout promises."""


class JobFailedError(Exception):
    """A job failed before its run had a folder, or so that its sweep ends; shown as one message, with exit code 1."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return a hint such as `" (did you mean 'alpha'?)"`, or an empty string if no name is similar.

    Args:
        given: The name as it was written.
        allowed: The names that would be valid.
    """
    matches = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def first_line(error: BaseException, longest: int = 160) -> str:
    """Return the first line of an error's text, or its kind where it has none (`EOFError`)."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:longest]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, e.g. `"1 thread"` or `"2 threads"`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_whole(value: object, minimum: int = 0, maximum: int | None = None) -> bool:
    """Return whether a value is an int in the given range, bounds included; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value >= minimum and (maximum is None or value <= maximum)


def is_number(value: object, minimum: float, below: float) -> bool:
    """Return whether a value is a number of at least `minimum` and below `below`; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value < below


def checked_choice(option: str, given: T, allowed: Sequence[T]) -> T:
    """Return `given` if it is one of `allowed`.

    Raises:
        ConfigError: It is not; the message names the nearest.
    """
    if given in allowed and not isinstance(given, bool):
        return given
    hint = nearest(given, [str(value) for value in allowed]) if isinstance(given, str) else ""
    raise ConfigError(f"{option}={given}: allowed are {', '.join(map(str, allowed))}{hint}")


def checked_whole(option: str, given: int, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Return `given` if it is a whole number in the range, bounds included.

    Raises:
        ConfigError: It is not.
    """
    if is_whole(given, minimum, maximum):
        return given
    upper = "" if maximum is None else f", at most {maximum}"
    raise ConfigError(f"{option}={given}: must be an integer, at least {minimum}{upper}")


def checked_number(option: str, given: float, *, minimum: float, maximum: float) -> float:
    """Return `given` as a float if it lies in the range, bounds included.

    Raises:
        ConfigError: It does not.
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or not minimum <= given <= maximum:
        raise ConfigError(f"{option}={given}: must be a number from {minimum} to {maximum}")
    return float(given)
