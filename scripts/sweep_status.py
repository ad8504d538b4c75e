"""Print how far sweeps are, at any time, from their records alone.

python scripts/sweep_status.py                      # all sweeps in outputs/sweeps, a line each
python scripts/sweep_status.py lambda_alpha         # one, by name or folder: a line a job
python scripts/sweep_status.py lambda_alpha --json  # the same for a program
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError, nearest  # noqa: E402
from gramgn.records import CellStatus, SweepFolder, count_states, find_sweeps  # noqa: E402

SWEEPS = ROOT / "outputs" / "sweeps"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 printed, 2 no such sweep or damaged records."""
    parser = argparse.ArgumentParser(description="Print how far sweeps are.")
    parser.add_argument("sweeps", nargs="*", help="names in outputs/sweeps, or folders; none: all")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    given = parser.parse_args(arguments)
    code = 0
    found: list[tuple[SweepFolder, list[CellStatus]]] = []
    for sweep in given.sweeps or find_sweeps(SWEEPS):
        try:
            folder = _folder(sweep) if isinstance(sweep, str) else sweep
            found.append((folder, folder.cells()))
        except InputError as error:  # one that cannot be read hides no other
            print(f"error: {error}", file=sys.stderr)
            code = 2
    try:
        print(_text(found, as_json=given.json, with_jobs=bool(given.sweeps)), flush=True)
    except BrokenPipeError:
        # Its reader, e.g. head, has seen enough; what Python writes out as it ends goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _text(found: Sequence[tuple[SweepFolder, list[CellStatus]]], *, as_json: bool, with_jobs: bool) -> str:
    if as_json:
        return json.dumps([_as_json(folder, cells) for folder, cells in found], indent=1)
    if not found and not with_jobs:
        return f"there are no sweeps in {SWEEPS}"
    return "\n".join(
        "\n".join([_headline(folder, cells), *([_table(cells)] if with_jobs else [])])
        for folder, cells in found
    )


def _folder(name: str) -> SweepFolder:
    """Return the sweep of that name or in that folder.

    Raises:
        InputError: If there is none.
    """
    for path in (Path(name), SWEEPS / name):
        if path.is_dir():
            return SweepFolder(path)
    known = [sweep.path.name for sweep in find_sweeps(SWEEPS)]
    listed = f" It holds {', '.join(known[:10])}" if known else " It holds none"
    raise InputError(f"there is no sweep {name} in {SWEEPS}{nearest(name, known)}.{listed}")


def _headline(folder: SweepFolder, cells: Sequence[CellStatus]) -> str:
    counts = ", ".join(f"{number} {state}" for state, number in count_states(cells).items())
    commits = dict.fromkeys(commit for cell in cells for commit in cell.commits)
    mixed = f"; mixed code versions: {', '.join(commits)}" if len(commits) > 1 else ""
    return f"{folder.path.name}: {len(cells)} jobs: {counts}{mixed}"


def _table(cells: Sequence[CellStatus]) -> str:
    rows = [("state", "epoch", "train loss", "val loss", "time", "job")]
    rows += [
        (
            cell.state,
            "" if cell.epoch is None else f"{cell.epoch}/{cell.epochs}",
            _number(cell.train_loss),
            _number(cell.val_loss),
            "" if cell.elapsed_s is None else f"{cell.elapsed_s:.0f} s",
            cell.label + (f"  ({cell.error.splitlines()[0][:100]})" if cell.error else ""),
        )
        for cell in cells
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join(["", *(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _as_json(folder: SweepFolder, cells: Sequence[CellStatus]) -> dict[str, Any]:
    record = folder.read()
    return {
        "name": folder.path.name,
        "active": folder.is_active(),
        "command": record.get("command"),
        "axes": record.get("axes"),
        "states": count_states(cells),
        "code_versions": list(dict.fromkeys(commit for cell in cells for commit in cell.commits)),
        "cells": [cell.as_json() for cell in cells],
    }


if __name__ == "__main__":
    raise SystemExit(main())
