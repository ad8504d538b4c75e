"""The runs of the page and the columns of their table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from gramgn.errors import InputError
from gramgn.records import METRIC_NAMES, SETTING_COLUMNS, WAITING, RunFolder, flat

NOTHING = "–"
_REASONS = {
    "running": "not finished: still running, or killed",
    WAITING: "not begun; rerun the sweep's command",
}
_BEST = "in the epoch with the least val_loss"
_LAST = "the last one recorded"
COLUMNS = (
    ("state", "state", "done, diverged, failed, interrupted, running or waiting"),
    ("optimizer", "optimizer", "conf/optimizer"),
    ("model", "model", "conf/model"),
    ("λ", "lam", "lam"),
    ("α", "alpha", "alpha, in the configured convention"),
    ("lr", "lr", "learning rate (scales the step of GGN)"),
    ("seed", "seed", "seed of weights and data order"),
    ("epoch", "last epoch", "last epoch recorded"),
    ("of", "epochs", "epochs planned"),
    ("train loss", "last train_loss", f"train_loss, {_LAST}"),
    ("val loss", "last val_loss", f"val_loss, {_LAST}"),
    ("test loss", "last test_loss", f"test_loss, {_LAST}"),
    ("test MAE", "last test_mae", f"test_mae, {_LAST}"),
    ("unit", "unit", "unit of the mean absolute error"),
    ("best epoch", "best epoch", "the epoch with the least val_loss"),
    ("best val loss", "best val_loss", f"val_loss {_BEST}"),
    ("best test loss", "best test_loss", f"test_loss {_BEST}"),
    ("best test MAE", "best test_mae", f"test_mae {_BEST}"),
    ("data", "data", "data set; SYNTHETIC marks a synthetic one"),
    ("scale", "scale", "conf/trainer"),
    ("experiment", "experiment", "conf/experiment"),
    ("sweep", "sweep", "conf/sweep"),
    ("convention", "damping_convention", "convention of alpha"),
    ("α sum", "alpha_sum", "effective alpha relative to the sum J Jᵀ"),
    ("momentum", "momentum", "SGD's, or mu of SPRING"),
    ("b", "batch_size", "batch size"),
    ("train s", "last train_s", "seconds of training only"),
    ("s/epoch", "seconds per epoch", "seconds of training per epoch"),
    ("peak MiB", "peak", "peak memory"),
    ("device", "device", "where it was trained"),
    ("threads", "threads", "CPU threads"),
)
"""Heading, column of `run_values`, what its values are; the most consulted first."""
NUM_PRINTED = 18
"""Number of columns that are also printed: paper is narrower than the table."""


@dataclass(frozen=True, eq=False)
class ReportRun:
    """One run as the page shows it: its rows of the table of runs."""

    rows: pd.DataFrame

    @property
    def name(self) -> str:
        """Its folder, relative to the folder that was searched."""
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
        """Why it did not finish; None if it did."""
        if self.state == "done":
            return None
        error = self.value("error")
        if not error and self.state == "diverged":
            last = self.rows.epoch.max()
            return f"non-finite loss or step after epoch {0 if pd.isna(last) else last:.0f}"
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


def run_values(table: pd.DataFrame) -> pd.DataFrame:
    """Return the values of `COLUMNS` with a row per run, sorted by run; None where there is no value."""
    metrics = ["run", *METRIC_NAMES.values()]
    last = table[metrics].groupby("run").last().add_prefix("last ")
    best = table.loc[table.val_loss.abs() < math.inf, metrics].sort_values("val_loss", kind="stable")
    best = best.drop_duplicates("run").set_index("run").add_prefix("best ")
    found = table.drop_duplicates("run").set_index("run").sort_index().join([last, best])
    found["data"] = found.dataset + (found.kind == "synthetic").map({True: " (SYNTHETIC)", False: ""})
    found["seconds per epoch"] = found["last train_s"] / found["last epoch"].where(found["last epoch"] != 0)
    found["peak"] = table.groupby("run").peak_mem_mib.max().round()
    found = found[[column for _, column, _ in COLUMNS]].astype(object)
    return found.where(found.notna(), None)


def number_text(value: Any) -> str:
    """Return a number with at most four significant digits, a text as it is, a dash for none."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    number = float(value)
    # A count, an epoch or a seed is written in full.
    return str(int(number)) if number.is_integer() and abs(number) < 1e9 else f"{number:.4g}"
