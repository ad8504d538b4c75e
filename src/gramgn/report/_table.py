"""The columns of the runs table: what is shown of a run, and by what it is sorted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ._entries import Entry
from ._settings import plain

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        text: What is read.
        key: A number to sort by, as JavaScript's ``Number`` reads it; empty for a number that is missing or NaN
            (these stand last); ``None`` for a cell that is sorted by its text.
    """

    text: str
    key: str | None = None


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        title: Its heading.
        explains: What the numbers are, for readers who stop at the heading.
        is_number: Whether it is set and sorted as a number.
        value: From a run to what stands in the cell; ``None`` if the run has nothing of the kind.
        is_printed: Whether it is on paper too, which is narrower than the table.
    """

    title: str
    explains: str
    is_number: bool
    value: Callable[[Entry], Any]
    is_printed: bool = True

    def cell(self, entry: Entry) -> Cell:
        """Return this column's cell of a run.

        Args:
            entry: The run.
        """
        value = self.value(entry)
        if not self.is_number:
            return Cell(NOTHING if value is None else plain(value))
        number = as_number(value)
        return Cell(number_text(number), _sort_key(number))


def number_text(value: float | None) -> str:
    """Return a number with at most four significant digits, a dash for none.

    Args:
        value: Any float, or ``None``.
    """
    if value is None:
        return NOTHING
    # A count, an epoch or a seed is read whole.
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def as_number(value: Any) -> float | None:
    """Return a value of a record as a float, or ``None`` if it is none.

    ``run.json`` holds the numbers that JSON does not know as ``"nan"``, ``"inf"`` and ``"-inf"``.

    Args:
        value: Anything out of a record.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def columns() -> list[Column]:
    """Return the columns after the first one, which is the run's folder; what is looked at most comes first."""
    return [*_what(), *_results(), *(replace(column, is_printed=False) for column in (*_where(), *_cost()))]


def _what() -> list[Column]:
    def setting(title: str, explains: str, *keys: str) -> Column:
        return Column(title, explains, True, lambda run: run.get("config", *keys))

    return [
        Column("state", "done, diverged, failed, interrupted or running", False, lambda run: run.state),
        Column("optimizer", "conf/optimizer", False, lambda run: run.get("optimizer", "name")),
        Column("model", "conf/model", False, lambda run: run.get("model", "name")),
        setting("λ", "lam", "optimizer", "lam"),
        setting("α", "alpha, in the convention that was set", "optimizer", "alpha"),
        setting("lr", "learning rate (scales the step of GGN)", "optimizer", "lr"),
        Column("seed", "seed of weights and data order", True, lambda run: run.get("seed")),
    ]


def _results() -> list[Column]:
    def last(title: str, column: str) -> Column:
        return Column(title, f"{column}, the last one recorded", True, lambda run: run.last(column))

    def best(title: str, key: str) -> Column:
        return Column(title, f"{key} in the best epoch", True, lambda run: _best(run, key))

    return [
        Column("epoch", "last epoch in metrics.csv", True, lambda run: run.last_epoch),
        Column("of", "epochs asked for", True, lambda run: run.get("config", "trainer", "epochs")),
        last("train loss", "train_loss"),
        last("val loss", "val_loss"),
        last("test loss", "test_loss"),
        last("test MAE", "test_mae"),
        Column("unit", "unit of the mean absolute error", False, lambda run: run.get("dataset", "unit")),
        Column(
            "best epoch", "the epoch with the least validation loss", True, lambda run: _best(run, "epoch")
        ),
        best("best val loss", "val_loss"),
        best("best test loss", "test_loss"),
        best("best test MAE", "test_mae"),
    ]


def _where() -> list[Column]:
    return [
        Column("data", "data set; SYNTHETIC marks a stand-in", False, _data),
        Column("scale", "conf/trainer", False, lambda run: run.get("config", "trainer", "scale")),
        Column("experiment", "conf/experiment", False, lambda run: run.get("choices", "experiment")),
        Column("sweep", "conf/sweep, or else the sweep's folder", False, _sweep),
        Column(
            "convention", "where alpha stands", False, lambda run: run.get("optimizer", "damping_convention")
        ),
        Column(
            "α sum",
            "effective alpha beside the sum J Jᵀ",
            True,
            lambda run: run.get("optimizer", "alpha_sum"),
        ),
        Column(
            "momentum", "SGD's, or mu of SPRING", True, lambda run: run.get("config", "optimizer", "momentum")
        ),
        Column("b", "batch size", True, lambda run: run.get("config", "trainer", "batch_size")),
    ]


def _cost() -> list[Column]:
    return [
        Column("train s", "seconds of training alone", True, lambda run: run.last("train_s")),
        Column("s/epoch", "seconds of training an epoch", True, _seconds_an_epoch),
        Column("peak MiB", "peak memory", True, _peak),
        Column("device", "where it was trained", False, lambda run: run.get("device", "name")),
        Column("threads", "CPU threads", True, lambda run: run.get("threads")),
    ]


def _sweep(run: Entry) -> Any:
    return run.get("choices", "sweep") or run.get("group") or None


def _data(run: Entry) -> str | None:
    name = run.get("dataset", "name")
    mark = " (SYNTHETIC)" if run.get("dataset", "kind") == "synthetic" else ""
    return None if name is None else f"{plain(name)}{mark}"


def _best(run: Entry, key: str) -> Any:
    """Return a number of the epoch with the least validation loss, from the record or else from the rows."""
    if isinstance(run.get("best"), dict):
        return run.get("best", key)
    losses = [(row["val_loss"], row) for row in run.rows if row["val_loss"] is not None]
    finite = [(loss, row) for loss, row in losses if math.isfinite(loss)]
    return min(finite, key=lambda pair: pair[0])[1].get(key) if finite else None


def _seconds_an_epoch(run: Entry) -> float | None:
    seconds = run.last("train_s")
    return seconds / run.last_epoch if seconds is not None and run.last_epoch else None


def _peak(run: Entry) -> float | None:
    found = [value for row in run.rows if (value := row["peak_mem_mib"]) is not None and math.isfinite(value)]
    return round(max(found)) if found else None


def _sort_key(number: float | None) -> str:
    if number is None or math.isnan(number):
        return ""
    return repr(number) if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
