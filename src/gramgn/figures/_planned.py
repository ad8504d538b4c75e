"""Cells of a grid that have not begun: ``sweep.json`` knows of them, so that a half-finished grid shows its gaps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gramgn.records import SWEEP_FILE, SweepFolder

from ._grid import ALPHA, LAM, WAITING
from ._panels import GRID_SWEEP
from ._run import Run

_KEYS = (LAM, ALPHA, "seed")


def planned_cells(begun: Mapping[Path, Run]) -> list[Run]:
    """Return a run without rows, in the state ``"waiting"``, for each cell of a grid that has no run yet.

    Args:
        begun: Runs by folder, whatever their state.

    Raises:
        InputError: The ``sweep.json`` of a grid is damaged.
    """
    grids: dict[Path, Run] = {}
    for path, run in begun.items():
        if run.sweep == GRID_SWEEP and (path.parent / SWEEP_FILE).is_file():
            grids.setdefault(path.parent, run)
    found = []
    for folder, sibling in sorted(grids.items()):
        for cell in SweepFolder(folder).read()["cells"]:
            if folder / cell["folder"] not in begun:
                found.append(_waiting(cell, sibling))
    return found


def _waiting(cell: Mapping[str, Any], sibling: Run) -> Run:
    """Return what a cell will be: its sibling with other lambda, alpha and seed."""
    words = [str(word).partition("=") for word in cell.get("overrides") or ()]
    given = {key: _number(value) for key, _, value in words if key in _KEYS}
    config = dict(sibling.part("config"))
    optimizer = {**config.get("optimizer", {})}
    optimizer |= {key.partition(".")[2]: value for key, value in given.items() if key != "seed"}
    seed = given.get("seed", sibling.record.get("seed"))
    record = {**sibling.record, "state": WAITING, "seed": seed, "config": {**config, "optimizer": optimizer}}
    return Run(str(cell["folder"]), record, [])


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
