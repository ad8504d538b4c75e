"""The columns of the table of runs: name, type and where the value is found in run.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gramgn.records.metrics import AVERAGE_COLUMNS, INTEGER_COLUMNS, METRIC_COLUMNS

TEXT, INTEGER, NUMBER, FLAG, SIZE = "text", "integer", "number", "flag", "size"
"""Types of columns. `SIZE` is a number of examples or the word `full`."""


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    name: str
    type: str = TEXT  # or `INTEGER`, `NUMBER`, `FLAG`, `SIZE`
    place: str = ""  # dotted entry of run.json; empty if the value is computed
    digits: int | None = None  # number of digits kept of a hash; None keeps the whole text


RUN_COLUMNS = (
    Column("experiment", TEXT, "choices.experiment"),
    Column("sweep", TEXT, "choices.sweep"),
    Column("run"),
    Column("state", TEXT, "state"),
    Column("seed", INTEGER, "seed"),
    Column("dataset", TEXT, "dataset.name"),
    Column("kind", TEXT, "dataset.kind"),
    Column("unit", TEXT, "dataset.unit"),
    Column("image_size", INTEGER, "dataset.image_size"),
    Column("num_images", INTEGER, "dataset.summary.used"),
    Column("manifest", TEXT, "dataset.manifest_sha256", digits=12),
    Column("scale", TEXT, "config.trainer.scale"),
    Column("standardized", FLAG, "config.trainer.standardize_targets"),
    Column("model", TEXT, "model.name"),
    Column("depth", INTEGER, "config.model.depth"),
    Column("optimizer", TEXT, "optimizer.name"),
    Column("lr", NUMBER, "config.optimizer.lr"),
    Column("lam", NUMBER, "config.optimizer.lam"),
    Column("alpha", NUMBER, "config.optimizer.alpha"),
    Column("damping_convention", TEXT, "config.optimizer.damping_convention"),
    Column("alpha_sum", NUMBER, "optimizer.alpha_sum"),
    Column("momentum", NUMBER, "config.optimizer.momentum"),
    Column("epochs", INTEGER, "config.trainer.epochs"),
    Column("batch_size", SIZE, "config.trainer.batch_size"),
    Column("threads", INTEGER, "threads"),
    Column("device_kind", TEXT, "device.kind"),
    Column("device", TEXT, "device.name"),
    Column("other_settings"),
    Column("began"),
    Column("git", TEXT, "git.commit", digits=12),
    Column("git_diff", TEXT, "git.diff_sha256", digits=12),
    Column("torch", TEXT, "versions.torch"),
    Column("kernels", TEXT, "kernels"),
    Column("schedule", TEXT, "config.schedule.shape"),
    Column("augment", TEXT, "choices.augment"),
    Column("average_decay", NUMBER, "config.trainer.average_decay"),
    Column("n", INTEGER, "theory.n"),
    Column("d", INTEGER, "theory.d"),
    Column("M", INTEGER, "theory.M"),
    Column("activation", TEXT, "theory.activation"),
    Column("order", TEXT, "theory.order"),
    Column("lambda_0", NUMBER, "theory.lambda_0"),
    Column("kernel_gap", NUMBER, "theory.kernel_gap"),
    Column("rho", NUMBER, "theory.rho"),
)
"""Columns that are the same in all rows of a run; those from `n` on belong to runs of the theory."""

METRIC_NAMES: Mapping[str, str] = {
    name: f"epoch_{name}" if name in {column.name for column in RUN_COLUMNS} else name
    for name in METRIC_COLUMNS
}
"""Columns of metrics.csv and their names in the table: `lr`, `lam`, `alpha`, `alpha_sum` and `momentum` of an epoch,
which schedules and adaptive damping change, are `epoch_lr`, `epoch_lam` and so on."""

METRICS = tuple(
    Column(METRIC_NAMES[name], INTEGER if name in INTEGER_COLUMNS else NUMBER) for name in METRIC_COLUMNS
)
"""Columns that differ from epoch to epoch, in the order of metrics.csv."""

LOCAL_COLUMNS = (Column("folder"), Column("code"), Column("error"), Column("source"))
"""What a results CSV does not hold: the run's folder (absolute), all versions of the code it ran with, why it failed,
stopped or diverged, and where it was read from: the folder that `run` is relative to, or the CSV."""

RUN_KEY = ("source", "run")
"""Columns that identify a run in the table."""

THEORY_COLUMNS = (
    *("n", "d", "M", "activation", "order", "lambda_0", "kernel_gap", "rho"),
    *("residual", "linear_residual", "distance", "drift_J", "drift_J_row", "drift_G"),
)
"""Columns that only runs of the theory have, see `gramgn.theory.Observer`."""

TRAINING_COLUMNS = ("schedule", "augment", "average_decay", *AVERAGE_COLUMNS)
"""Columns of runs that have a schedule, augmentation or averaged weights."""

RESULT_COLUMNS = (
    *(column.name for column in RUN_COLUMNS if column.name not in (*THEORY_COLUMNS, *TRAINING_COLUMNS)),
    *("epoch", "step", "train_s", "train_loss", "train_mae"),
    *("val_loss", "val_mae", "test_loss", "test_mae", "peak_mem_mib"),
)
"""Columns of a results CSV, in order; `TRAINING_COLUMNS` and `THEORY_COLUMNS` follow where it has such runs."""

ADDED_COLUMNS = ("kernels",)
"""Columns that results CSVs of earlier versions lack."""

TABLE_COLUMNS = (*RUN_COLUMNS, *METRICS, *LOCAL_COLUMNS)


def look_up(record: Any, place: str) -> Any:
    """Return an entry of a nested mapping by its dotted name; None where it is missing."""
    value = record
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def fits(value: Any, type_: str) -> bool:
    """Return whether a value of run.json is of a column's type; a missing one fits every type."""
    if value is None:
        return True
    if type_ == FLAG or isinstance(value, bool):
        return type_ == FLAG and isinstance(value, bool)
    allowed = {TEXT: str, INTEGER: int, NUMBER: int | float, SIZE: int | str}
    return isinstance(value, allowed[type_])
