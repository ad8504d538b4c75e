"""Jobs of sweeps that left no run folder: what was asked for and is not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.records import SWEEP_FILE, RunFolder, SweepFolder

from ._entries import relative
from ._overview import Problem

_REASONS = {
    "waiting": "its turn has not come; the sweep's command, given again, goes on",
    "running": "it has just begun",
    "killed": "it ended before its first record; the sweep's command, given again, goes on",
}


def absent_jobs(root: Path) -> list[Problem]:
    """Return the jobs that a sweep lists and that have no ``run.json``, and the sweeps that cannot be read.

    Args:
        root: Folder to search, to any depth.
    """
    top = Path(root).absolute()
    found: list[Problem] = []
    for folder, folders, files in os.walk(top):
        if "run.json" in files:
            folders.clear()
        elif SWEEP_FILE in files:
            found += _absent(SweepFolder(folder), top)
    return found


def _absent(sweep: SweepFolder, top: Path) -> list[Problem]:
    name = sweep.path.relative_to(top).as_posix()
    try:
        cells = sweep.read()["cells"]
    except InputError as error:
        return [Problem(name, "unreadable", relative(str(error), top))]
    # Not SweepFolder.cells(): one damaged run would keep the others of its sweep from being named.
    active = sweep.is_active()
    return [
        _problem(f"{name}/{cell['folder']}", cell, active)
        for cell in cells
        if not RunFolder(sweep.path / cell["folder"]).run_json.is_file()
    ]


def _problem(path: str, cell: Mapping[str, Any], active: bool) -> Problem:
    state = str(cell.get("state") or "waiting")
    if state in ("done", "diverged"):
        return Problem(path, "missing", f"its sweep recorded it as {state}, but its folder is gone")
    if state == "running" and not active:
        state = "killed"
    return Problem(path, state, str(cell.get("error") or _REASONS.get(state, "no reason was recorded")))
