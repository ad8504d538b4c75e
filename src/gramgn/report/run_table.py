"""The runs of the page and the columns of their table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from gramgn.errors import InputError
from gramgn.records import SETTING_COLUMNS, WAITING, RunFolder, flat

NOTHING = "–"
_REASONS = {
    "running": "not finished: still running, or killed",
    WAITING: "not begun; rerun the sweep's command",
}


@dataclass(frozen=True, eq=False)
class ReportRun:
    """One run as the page shows it.

    Attributes:
        rows: Its rows of the table of runs.
    """

    rows: pd.DataFrame

    @property
    def name(self) -> str:
        """Its folder, relative to the searched one."""
        return str(self.rows.run.iloc[0])

    @property
    def anchor(self) -> str:
        """Its place in the page: plain letters and digits whatever the folder is called."""
        return "run-" + hashlib.sha256(self.name.encode(errors="replace")).hexdigest()[:12]

    @property
    def state(self) -> str:
        """Its state, e.g. `"done"`."""
        return str(self.rows.state.iloc[0])

    @property
    def reason(self) -> str | None:
        """Why it did not end well; None if it did."""
        if self.state == "done":
            return None
        error = self.value("error")
        if not error and self.state == "diverged":
            return f"non-finite loss or step after epoch {self.last('epoch') or 0:.0f}"
        return error or _REASONS.get(self.state, "no reason was recorded")

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The content of its run.json; empty for a run of a results file."""
        folder = self.value("folder")
        try:
            return RunFolder(folder).read_run() if folder and self.state != WAITING else {}
        except InputError:  # removed since the table was read
            return {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its configuration by dotted key; of a run of a results file the settings with a column there."""
        if self.record:
            return flat(self.record.get("config") or {})
        values = {key: self.value(name) for name, key in SETTING_COLUMNS.items()}
        return {key: value for key, value in values.items() if value is not None}

    def value(self, column: str) -> Any:
        """Return a value that is the same in all rows; None if it is missing."""
        value = self.rows[column].iloc[0]
        if pd.isna(value):
            return None
        return value.item() if hasattr(value, "item") else value

    def last(self, column: str) -> Any:
        """Return the last recorded value of a metric; None if there is none."""
        values = self.rows[column].dropna()
        return values.iloc[-1] if len(values) else None

    def best(self, column: str) -> Any:
        """Return a metric in the epoch with the least validation loss; None if there is none."""
        rows = self.rows[self.rows.val_loss.abs() < math.inf].sort_values("val_loss", kind="stable")
        value = rows[column].iloc[0] if len(rows) else None
        return None if pd.isna(value) else value


@dataclass(frozen=True)
class RunColumn:
    """One column of the table.

    Attributes:
        title: Its heading.
        explains: What its values are.
        value: From a run to the value; None if there is none.
        is_printed: Whether it is on paper, too, which is narrower than the table.
    """

    title: str
    explains: str
    value: Callable[[ReportRun], Any]
    is_printed: bool = True


def columns() -> list[RunColumn]:
    """Return the columns after the first one, which is the run's folder; what is looked at most comes first."""

    def plain(title: str, name: str, explains: str) -> RunColumn:
        return RunColumn(title, explains, lambda run: run.value(name))

    def last(title: str, name: str, explains: str = "") -> RunColumn:
        return RunColumn(title, explains or f"{name}, the last one recorded", lambda run: run.last(name))

    def best(title: str, name: str) -> RunColumn:
        return RunColumn(title, f"{name} in the epoch with the least val_loss", lambda run: run.best(name))

    def further(column: RunColumn) -> RunColumn:
        return RunColumn(column.title, column.explains, column.value, is_printed=False)

    return [
        plain("state", "state", "done, diverged, failed, interrupted, running or waiting"),
        plain("optimizer", "optimizer", "conf/optimizer"),
        plain("model", "model", "conf/model"),
        plain("λ", "lam", "lam"),
        plain("α", "alpha", "alpha, in the configured convention"),
        plain("lr", "lr", "learning rate (scales the step of GGN)"),
        plain("seed", "seed", "seed of weights and data order"),
        last("epoch", "epoch", "last epoch recorded"),
        plain("of", "epochs", "epochs planned"),
        last("train loss", "train_loss"),
        last("val loss", "val_loss"),
        last("test loss", "test_loss"),
        last("test MAE", "test_mae"),
        plain("unit", "unit", "unit of the mean absolute error"),
        RunColumn("best epoch", "the epoch with the least val_loss", lambda run: run.best("epoch")),
        best("best val loss", "val_loss"),
        best("best test loss", "test_loss"),
        best("best test MAE", "test_mae"),
        further(RunColumn("data", "data set; SYNTHETIC marks a synthetic one", _data)),
        *map(
            further,
            (
                plain("scale", "scale", "conf/trainer"),
                plain("experiment", "experiment", "conf/experiment"),
                plain("sweep", "sweep", "conf/sweep"),
                plain("convention", "damping_convention", "convention of alpha"),
                plain("α sum", "alpha_sum", "effective alpha relative to the sum J Jᵀ"),
                plain("momentum", "momentum", "SGD's, or mu of SPRING"),
                plain("b", "batch_size", "batch size"),
                last("train s", "train_s", "seconds of training only"),
                RunColumn("s/epoch", "seconds of training per epoch", _seconds_per_epoch),
                RunColumn("peak MiB", "peak memory", _peak),
                plain("device", "device", "where it was trained"),
                plain("threads", "threads", "CPU threads"),
            ),
        ),
    ]


def number_text(value: Any) -> str:
    """Return a number with at most four significant digits, a text as it is, a dash for none."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    number = float(value)
    # A count, an epoch or a seed is written in full.
    return str(int(number)) if number.is_integer() and abs(number) < 1e9 else f"{number:.4g}"


def _data(run: ReportRun) -> str | None:
    mark = " (SYNTHETIC)" if run.value("kind") == "synthetic" else ""
    return f"{run.value('dataset')}{mark}" if run.value("dataset") else None


def _seconds_per_epoch(run: ReportRun) -> float | None:
    seconds, epoch = run.last("train_s"), run.last("epoch")
    return seconds / epoch if seconds is not None and epoch else None


def _peak(run: ReportRun) -> float | None:
    peak = run.rows.peak_mem_mib.max()
    return None if pd.isna(peak) else round(peak)
