"""A sweep as one table, a row a cell: lambda, alpha, seed, metric, status, and whatever else it varies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramgn.records import SWEEP_FILE, CellStatus, RunFolder, SweepFolder, count_states

METRIC = "train_loss"
# The sweep may vary them, but they make no column of their own: three have one, the others say nothing of the result.
_FIXED = {"optimizer.lam": "lam", "optimizer.alpha": "alpha", "seed": "seed"}
_INCIDENTAL = ("tracking", "name", "resume", "trainer.device", "trainer.threads")
_SHARED = ("config", "dataset", "model", "optimizer", "git", "group")  # entries of run.json


@dataclass(frozen=True)
class SweepTable:
    """What a sweep's summary shows.

    Attributes:
        name: Name of the sweep.
        columns: ``lam, alpha, seed, metric, status``, the further axes, ``epoch`` and ``cell`` (folder).
        rows: One a cell, in the sweep's order. ``metric`` is the training loss at the last epoch, in squared
            standardised units, of cells that are done, else None; alpha is in the configured convention.
        states: Number of cells by status.
        run: What its ``run.json`` would hold: name, group, configuration, and of the latter, data set, model,
            optimizer and code version what all cells share.
    """

    name: str
    columns: list[str]
    rows: list[list[Any]]
    states: Mapping[str, int]
    run: Mapping[str, Any]


@dataclass(frozen=True)
class _Cell:
    status: CellStatus
    overrides: Mapping[str, str]
    run: Mapping[str, Any]  # content of run.json; empty before the job began


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder is a sweep's.

    Args:
        folder: Any folder, or none.
    """
    return (folder / SWEEP_FILE).is_file()


def sweep_table(folder: Path) -> SweepTable:
    """Return the table of a sweep, from its records alone; it may have moved, and be unfinished.

    Args:
        folder: The sweep's folder.

    Raises:
        InputError: ``sweep.json`` is missing, or it or a run's file is damaged.
    """
    sweep = SweepFolder(folder)
    record, cells = sweep.read(), [_cell(status) for status in sweep.cells()]
    axes = _further_axes(cells)
    name = str(record.get("name") or sweep.path.name)
    runs = [{key: cell.run.get(key) or {} for key in _SHARED} for cell in cells if cell.run]
    shared = _common(runs) if runs else {}
    config = {"sweep": name, "metric": METRIC, "axes": record.get("axes"), "shared": shared.pop("config", {})}
    # The runs' own: it stays where they are on W&B, also when the folder was renamed.
    group = shared.pop("group", None) or name
    return SweepTable(
        name,
        [*_FIXED.values(), "metric", "status", *axes, "epoch", "cell"],
        [_row(cell, axes) for cell in cells],
        count_states([cell.status for cell in cells]),
        {"name": name, "group": group, "config": config, **shared},
    )


def _cell(status: CellStatus) -> _Cell:
    overrides = dict(each.split("=", 1) for each in status.overrides if "=" in each)
    run = RunFolder(status.folder)
    return _Cell(status, overrides, run.read_run() if run.run_json.is_file() else {})


def _row(cell: _Cell, axes: Sequence[str]) -> list[Any]:
    loss = cell.status.train_loss if cell.status.state == "done" else None
    return [
        *(_number(cell, key) for key in _FIXED),
        loss if loss is not None and math.isfinite(loss) else None,
        cell.status.state,
        # As they were written: a column of W&B has one type.
        *(cell.overrides.get(axis) for axis in axes),
        cell.status.epoch,
        cell.status.folder.name,
    ]


def _further_axes(cells: Sequence[_Cell]) -> list[str]:
    """Return the keys that differ between the cells' overrides, as they are written there."""
    keys = sorted({key for cell in cells for key in cell.overrides})
    return [
        key
        for key in keys
        if key.lstrip("+") not in _FIXED
        and not key.lstrip("+").startswith(_INCIDENTAL)
        and len({cell.overrides.get(key) for cell in cells}) > 1
    ]


def _number(cell: _Cell, key: str) -> float | int | None:
    """Return a number of the cell's configuration; of a cell that has not begun, of its overrides."""
    value: Any = cell.run.get("config") if cell.run else None
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        value = cell.overrides.get(key)
    try:
        return None if value is None else int(value) if key == "seed" else float(value)
    except ValueError:  # an override such as ${...}, of a cell that never began
        return None


def _common(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that are the same in all trees, at any depth."""
    shared: dict[str, Any] = {}
    for key, value in trees[0].items():
        values = [tree.get(key) for tree in trees]
        if all(isinstance(each, Mapping) for each in values):
            shared[key] = _common([each for each in values if isinstance(each, Mapping)])
        elif all(key in tree and tree[key] == value for tree in trees):
            shared[key] = value
    return shared
