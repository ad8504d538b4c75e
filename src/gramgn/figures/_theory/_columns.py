"""The columns of the theory's files as fields of a dataclass: what a cell may hold, and how it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from typing import Any, Self

from gramgn.errors import InputError


def whole(cell: str) -> int:
    """A whole number of at least 0."""
    if (value := int(cell)) < 0:
        raise ValueError(f"{cell} is below zero")
    return value


def number(cell: str) -> float:
    """A finite number."""
    if not math.isfinite(value := float(cell)):
        raise ValueError(f"{cell} is not a finite number")
    return value


def size(cell: str) -> float:
    """A finite number of at least 0."""
    if (value := number(cell)) < 0:
        raise ValueError(f"{cell} is below zero")
    return value


def maybe(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    """What another kind allows, or nothing."""
    return lambda cell: parse(cell) if cell else None


def word(cell: str) -> str:
    """Any text but none."""
    if not cell:
        raise ValueError("it is empty")
    return cell


def one_of(*allowed: str) -> Callable[[str], str]:
    """One of some words."""

    def parse(cell: str) -> str:
        if cell not in allowed:
            raise ValueError(f"{cell!r} is not one of {', '.join(allowed)}")
        return cell

    return parse


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
                raise InputError(f"{place}, column {each.name}: {error}") from error
        return cls(**values)

    def cells(self) -> list[str]:
        """Return the row as text."""
        return [_text(getattr(self, name)) for name in self.columns()]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)
