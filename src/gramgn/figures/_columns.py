"""The columns of a results file: where each stands in a run's records, and what a cell may hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gramgn.records import STATES

from ._run import OTHER_SETTINGS


def _text(cell: str) -> str | None:
    return cell or None


def _integer(cell: str) -> int | None:
    return int(cell) if cell else None


def _real(cell: str) -> float | None:
    return float(cell) if cell else None


def _finite(cell: str) -> float | None:
    value = _real(cell)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{cell} is not a finite number")
    return value


def _seconds(cell: str) -> float | None:
    value = _finite(cell)
    if value is not None and value < 0:
        raise ValueError(f"{cell} is below zero")
    return value


def _size(cell: str) -> int | str | None:
    return cell if cell == "full" else _integer(cell)


def _one_of(*allowed: str) -> Callable[[str], str | None]:
    def parse(cell: str) -> str | None:
        if cell not in allowed:
            raise ValueError(f"{cell!r} is not one of {', '.join(filter(None, allowed))}")
        return cell or None

    return parse


@dataclass(frozen=True)
class Column:
    """One column of a results file.

    Attributes:
        name: Its name in the first line.
        place: Where it stands in ``run.json``, by dotted name; of a metric, its name in ``metrics.csv``.
        parse: From the cell's text to its value; raises ``ValueError`` on what is not allowed.
        per_run: Whether it is the same in all rows of a run.
        digits: Of a hash, how many digits are kept.
    """

    name: str
    place: str
    parse: Callable[[str], Any] = _text
    per_run: bool = True
    digits: int | None = None


RUN_COLUMNS = (
    Column("experiment", "choices.experiment"),
    Column("sweep", "choices.sweep"),
    Column("run", ""),
    Column("state", "state", _one_of(*STATES)),
    Column("seed", "seed", _integer),
    Column("dataset", "dataset.name"),
    Column("kind", "dataset.kind", _one_of("real", "synthetic", "")),
    Column("unit", "dataset.unit"),
    Column("image_size", "dataset.image_size", _integer),
    Column("num_images", "dataset.summary.used", _integer),
    Column("manifest", "dataset.manifest_sha256", digits=12),
    Column("scale", "config.trainer.scale"),
    Column("standardized", "config.trainer.standardize_targets", _one_of("true", "false", "")),
    Column("model", "model.name"),
    Column("depth", "config.model.depth", _integer),
    Column("optimizer", "optimizer.name"),
    Column("lr", "config.optimizer.lr", _finite),
    Column("lam", "config.optimizer.lam", _finite),
    Column("alpha", "config.optimizer.alpha", _finite),
    Column("damping_convention", "config.optimizer.damping_convention"),
    Column("alpha_sum", "optimizer.alpha_sum", _finite),
    Column("momentum", "config.optimizer.momentum", _finite),
    Column("epochs", "config.trainer.epochs", _integer),
    Column("batch_size", "config.trainer.batch_size", _size),
    Column("threads", "threads", _integer),
    Column("device_kind", "device.kind"),
    Column("device", "device.name"),
    Column(OTHER_SETTINGS, OTHER_SETTINGS),
    Column("began", "began"),
    Column("git", "git.commit", digits=12),
    Column("git_diff", "git.diff_sha256", digits=12),
    Column("torch", "versions.torch"),
)
METRICS = (
    *(Column(name, name, _integer, per_run=False) for name in ("epoch", "step")),
    Column("train_s", "train_s", _seconds, per_run=False),
    *(
        Column(f"{split}_{kind}", f"{split}_{kind}", _real, per_run=False)
        for split in ("train", "val", "test")
        for kind in ("loss", "mae")
    ),
    Column("peak_mem_mib", "peak_mem_mib", _real, per_run=False),
)
RESULT_COLUMNS = tuple(column.name for column in (*RUN_COLUMNS, *METRICS))
