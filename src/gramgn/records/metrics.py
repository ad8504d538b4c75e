"""The rows of metrics.csv: one per epoch, every float written so that it reads back bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from gramgn.errors import InputError

Row: TypeAlias = dict[str, int | float | None]

INTEGER_COLUMNS = frozenset(
    {
        "epoch",
        "step",
        "solve_cholesky",
        "solve_eigh",
        "solve_minimum_norm",
        "solve_non_finite",
        "ill_conditioned",
        "rejected_steps",
        "given_up",
        "skipped_batches",
    }
)

METRIC_COLUMNS: tuple[str, ...] = (
    "epoch",  # 1 after the first epoch; 0 is the untrained network
    "step",  # optimizer steps so far
    "train_s",  # seconds of training only: device-synchronised, no evaluation, checkpoint, log or start-up
    "wall_s",  # seconds since the start, everything included; continued over a resume
    "train_loss",  # mean squared error in standardised units: running mean of the losses before each step
    "train_mae",  # in the unit of the targets (run.json "unit"), running mean over the epoch
    "train_eval_loss",  # optional full pass in evaluation mode
    "val_loss",
    "val_mae",
    "test_loss",
    "test_mae",
    "lr",
    "lam",
    "alpha",  # in the configured convention, of the last step: after warm-up, adaptive damping and schedules
    "alpha_sum",  # effective, in the sum convention (for the full batch size)
    "grad_norm",  # |gradient of the loss|, mean over the epoch; of optimizers that follow the gradient
    "step_norm",  # |d|, mean over the epoch
    "predicted_decrease",  # of the mean squared error, by the linear model; mean over the epoch
    "actual_decrease",  # on the same mini-batch, where adaptive damping or a line search measures it; mean
    "trace_gram",
    "lambda_min",
    "lambda_max",
    "solve_cholesky",  # counts of this epoch
    "solve_eigh",
    "solve_minimum_norm",
    "solve_non_finite",
    "ill_conditioned",
    "rejected_steps",  # trial steps that adaptive damping or a line search rejected
    "given_up",  # steps of which every trial was rejected, so that nothing moved
    "skipped_batches",
    "peak_mem_mib",
    "residual",  # |f - y| in the unit of the targets: this and the following with trainer.theory_every
    "linear_residual",  # the same on the network linearised at its start
    "distance",  # |W - W_0|, Frobenius
    "drift_J",  # |J - J_0|, Frobenius
    "drift_J_row",  # largest |J_i - J_0,i| of a row
    "drift_G",  # |G - G_0|, spectral
    "momentum",  # of the last step: with schedule.momentum
    "average_val_loss",  # of the averaged weights: with trainer.average_decay
    "average_val_mae",
    "average_test_loss",
    "average_test_mae",
)

AVERAGE_COLUMNS = METRIC_COLUMNS[-4:]
_ON_REQUEST = METRIC_COLUMNS[-5:]
"""Columns of the files of those runs only that have them."""


def columns_for(names: Collection[str]) -> list[str]:
    """Return the columns of a file in which these are used: those of every run, and what `names` has on request."""
    return [name for name in METRIC_COLUMNS if name in names or name not in _ON_REQUEST]


def idle_epochs_note(rows: Sequence[Row]) -> str:
    """Return a remark on the epochs in which every step was given up, so that nothing moved; empty without any."""
    steps = [row["step"] or 0 for row in rows]
    idle = sum(
        0 < step - before == row["given_up"]
        for row, step, before in zip(rows, steps, [0, *steps], strict=False)
    )
    if not idle:
        return ""
    return (
        f"in {idle} of {len(rows)} epochs every step was given up and nothing moved (columns given_up and alpha of "
        "metrics.csv): take a larger alpha or a smaller step size"
    )


def format_row(row: Mapping[str, int | float | None], columns: Sequence[str]) -> str:
    """Return one line of a `metrics.csv` with these columns; a missing or `None` value is an empty cell.

    Raises:
        ValueError: A name is not one of `METRIC_COLUMNS`, or `epoch` is missing.
    """
    unknown = sorted(set(row) - set(METRIC_COLUMNS))
    if unknown:
        raise ValueError(f"unknown metric columns {unknown}; allowed are {', '.join(METRIC_COLUMNS)}")
    if row.get("epoch") is None:
        raise ValueError("a metrics row needs its epoch")
    return ",".join(_format_cell(name, row.get(name)) for name in columns) + "\n"


def parse_metrics(text: str, source: str) -> list[Row]:
    """Return the rows of a `metrics.csv` with every name of `METRIC_COLUMNS`; an empty cell is None.

    Raises:
        InputError: The header has unknown columns, or a line is damaged; the message names `source` and line.
    """
    lines = text.splitlines(keepends=True)
    names = lines[0].rstrip("\r\n").split(",") if lines else ["epoch"]
    unknown = [name for name in names if name not in METRIC_COLUMNS]
    if unknown or "epoch" not in names:
        raise InputError(
            f"{source} is not a metrics file of this program: its first line has {unknown[:3] or names[:3]}; "
            f"the columns are {', '.join(METRIC_COLUMNS[:5])}, ..."
        )
    if len(set(names)) < len(names):
        raise InputError(f"{source} has a column twice in its first line, so that its values are not known")
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(_parse_line(line, names))
        except ValueError as error:
            raise InputError(
                f"{source}: line {number} is damaged ({error}). Repair or remove that line, or run again."
            ) from error
    return rows


def _parse_line(line: str, names: list[str]) -> Row:
    cells = line.rstrip("\r\n").split(",")
    if not line.endswith("\n") or len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells, expected {len(names)}")
    row: Row = dict.fromkeys(METRIC_COLUMNS)
    for name, cell in zip(names, cells, strict=True):
        if cell:
            row[name] = int(cell) if name in INTEGER_COLUMNS else float(cell)
    if row["epoch"] is None or row["epoch"] < 0:
        raise ValueError("no epoch")
    return row


def _format_cell(name: str, value: int | float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if name in INTEGER_COLUMNS else repr(float(value))
