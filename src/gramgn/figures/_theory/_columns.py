"""The columns of the theory's files as fields of a dataclass: what a cell may hold, and how it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from typing import Any, Self

from gramgn.errors import InputError

_MOST = 10**12
_GREATEST, _LEAST = 1e100, 1e-100  # squares, quotients and powers of what lies between are floats
_FASTEST = 1e6
_LONGEST = 200


def whole(cell: str) -> int:
    """A whole number of at least 0, in digits."""
    if not (cell.isascii() and cell.isdecimal()):
        raise ValueError(f"{_short(cell)} is not a whole number of at least 0")
    if len(cell) > 13 or int(cell) > _MOST:
        raise ValueError(f"{_short(cell)} is larger than anything that can be run")
    return int(cell)


def count(cell: str) -> int:
    """A whole number of at least 1."""
    if (value := whole(cell)) < 1:
        raise ValueError(f"{cell} is not at least 1")
    return value


def number(cell: str) -> float:
    """A finite number of at most 1e100; what is within 1e-100 of 0 counts as 0."""
    value = float(cell)
    if not math.isfinite(value) or abs(value) > _GREATEST:
        raise ValueError(f"{_short(cell)} is not a finite number, or beyond {_GREATEST:g}")
    return value if abs(value) >= _LEAST else 0.0


def size(cell: str) -> float:
    """A number of at least 0."""
    if (value := number(cell)) < 0:
        raise ValueError(f"{_short(cell)} is below zero")
    return value


def positive(cell: str) -> float:
    """A number above 0."""
    if (value := size(cell)) == 0:
        raise ValueError(f"{_short(cell)} is not above zero")
    return value


def rate(cell: str) -> float:
    """A factor an epoch: at least 0, and 1 or more where nothing converges."""
    if (value := size(cell)) > _FASTEST:
        raise ValueError(f"{_short(cell)} is beyond {_FASTEST:g}")
    return value


def maybe(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    """What another kind allows, or nothing."""
    return lambda cell: parse(cell) if cell else None


def word(cell: str) -> str:
    """A text of at most 200 letters, digits, spaces and the like."""
    if not cell:
        raise ValueError("it is empty")
    if len(cell) > _LONGEST or not cell.isprintable():
        raise ValueError(
            f"{_short(cell)!r} is longer than {_LONGEST} letters, or holds what cannot be printed"
        )
    return cell


def one_of(*allowed: str) -> Callable[[str], str]:
    """One of some words."""

    def parse(cell: str) -> str:
        if cell not in allowed:
            raise ValueError(f"{_short(cell)!r} is not one of {', '.join(allowed)}")
        return cell

    return parse


def _short(cell: str) -> str:
    return cell if len(cell) <= 40 else f"{cell[:39]}…"


def column(parse: Callable[[str], Any] = word) -> Any:
    """Return a field of a record.

    Args:
        parse: From the cell's text to the value; raises ``ValueError`` on what is not allowed.
    """
    return field(metadata={"parse": parse})


class Record:
    """A row of a file, whose columns are the fields of the class."""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the columns, in their order."""
        return tuple(each.name for each in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def parse(cls, cells: Sequence[str], place: str) -> Self:
        """Return the row that cells stand for.

        Raises:
            InputError: A cell cannot be; the message says where and why.
        """
        values = {}
        for each, cell in zip(fields(cls), cells, strict=True):  # type: ignore[arg-type]
            try:
                values[each.name] = each.metadata["parse"](cell)
            except ValueError as error:
                raise InputError(f"{place}, column {each.name}: {str(error)[:200]}") from error
        return cls(**values)

    def cells(self) -> list[str]:
        """Return the row as text."""
        return [_text(getattr(self, name)) for name in self.columns()]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)
