"""Print how far sweeps are, at any time, from their records alone.

python scripts/sweep_status.py                      # all sweeps in outputs/sweeps, one line per sweep
python scripts/sweep_status.py lambda_alpha         # one, by name or folder: one line per job
python scripts/sweep_status.py lambda_alpha --json  # the same for a program
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError, nearest  # noqa: E402
from gramgn.records import SWEEP_FILE, CellStatus, SweepFolder, count_states  # noqa: E402

SWEEPS = ROOT / "outputs" / "sweeps"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 printed, 2 no such sweep or damaged records."""
    parser = argparse.ArgumentParser(description="Print how far sweeps are.")
    parser.add_argument("sweeps", nargs="*", help="names in outputs/sweeps, or folders; none: all")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    given = parser.parse_args(arguments)
    known = sorted(path.parent.name for path in SWEEPS.glob(f"*/{SWEEP_FILE}"))
    code, texts, contents = 0, [], []
    for name in given.sweeps or known:
        try:
            content, cells = _read(name, known)
        except InputError as error:  # the others are shown all the same
            print(f"error: {error}", file=sys.stderr)
            code = 2
            continue
        contents.append(content)
        counts = ", ".join(f"{number} {state}" for state, number in content["states"].items())
        commits = content["code_versions"]
        mixed = f"; mixed code versions: {', '.join(commits)}" if len(commits) > 1 else ""
        texts.append(f"{content['name']}: {len(cells)} jobs: {counts}{mixed}")
        texts += [_table(cells)] if given.sweeps else []
    if not given.sweeps and not known:
        texts = [f"there are no sweeps in {SWEEPS}"]
    print(json.dumps(contents, indent=1) if given.json else "\n".join(texts))
    return code


def _read(name: str, known: Sequence[str]) -> tuple[dict[str, Any], list[CellStatus]]:
    """Return a sweep, by its name or folder, for a program, and its jobs.

    Raises:
        InputError: There is no such sweep, or sweep.json is damaged.
    """
    folders = [path for path in (Path(name), SWEEPS / name) if path.is_dir()]
    if not folders:
        listed = f" It holds {', '.join(known[:10]) or 'none'}"
        raise InputError(f"there is no sweep {name} in {SWEEPS}{nearest(name, known)}.{listed}")
    sweep = SweepFolder(folders[0])
    record, cells = sweep.read(), sweep.cells()
    content = {
        "name": sweep.path.name,
        "active": sweep.is_active(),
        "command": record.get("command"),
        "axes": record.get("axes"),
        "states": count_states(cell.state for cell in cells),
        "code_versions": list(dict.fromkeys(commit for cell in cells for commit in cell.commits)),
        "cells": [cell.as_json() for cell in cells],
    }
    return content, cells


def _table(cells: Sequence[CellStatus]) -> str:
    rows = [("state", "epoch", "train loss", "val loss", "time", "job")]
    for cell in cells:
        epoch = "" if cell.epoch is None else f"{cell.epoch}/{cell.epochs}"
        train, val = ("" if loss is None else f"{loss:.4g}" for loss in (cell.train_loss, cell.val_loss))
        seconds = "" if cell.elapsed_s is None else f"{cell.elapsed_s:.0f} s"
        reason = f"  ({cell.error.splitlines()[0][:100]})" if cell.error else ""
        queued = f"  [Slurm job {cell.slurm}]" if cell.slurm else ""
        rows.append((cell.state, epoch, train, val, seconds, cell.label + queued + reason))
    return "\n".join(f"  {row[0]:<12}{row[1]:<9}{row[2]:<12}{row[3]:<10}{row[4]:<9}{row[5]}" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
