"""Reading runs for figures and tables, and telling which of them cannot be shown and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.records import RunFolder, find_runs

from ._planned import planned_cells
from ._run import Run
from ._shape import check_shape
from ._theory import Theory, find_theory, read_theory

SHOWN = ("done", "diverged")


@dataclass(frozen=True)
class Loaded:
    """What was found.

    Attributes:
        runs: The runs that can be shown, ordered by path.
        unfinished: Runs that failed, were stopped or killed, or are still running, without their rows; only
            those that no finished run of the same setting and seed has replaced. A grid marks their cells.
        omitted: For each run left out ``"<path>: <why>"``.
        source: Where was looked, for messages.
        waiting: Cells of a grid that its sweep has not begun.
        theory: What the theory's studies measured.
    """

    runs: tuple[Run, ...]
    unfinished: tuple[Run, ...]
    omitted: tuple[str, ...]
    source: str
    waiting: tuple[Run, ...] = ()
    theory: Theory = field(default_factory=Theory)

    def __bool__(self) -> bool:
        """Tell whether there is anything to show."""
        return bool(self.runs or self.theory)


def load_runs(*roots: Path) -> Loaded:
    """Read all runs under some folders, and the theory's files in them and in their folder ``theory``.

    A run is shown if it is done or diverged and its metrics are whole; a damaged file of the theory is left out as
    well. Of several runs with the same settings and seed the newest is shown.

    Args:
        *roots: Folders to search, to any depth. Paths are relative to the folder they have in common.
    """
    base = Path(os.path.commonpath([Path(root).absolute() for root in roots]))
    folders = {folder.path: folder for root in roots for folder in find_runs(root)}
    runs: list[Run] = []
    unfinished: list[Run] = []
    omitted: list[str] = []
    begun: dict[Path, Run] = {}
    for path in sorted(folders):
        name = path.relative_to(base).as_posix()
        try:
            record = folders[path].read_run()
            check_shape(record)
            begun[path] = Run(name, record, [])
            if record["state"] not in SHOWN:
                unfinished.append(begun[path])
                raise InputError(_why_unfinished(record))
            runs.append(_load(folders[path], name, record))
        except InputError as error:
            omitted.append(f"{name}: {error}")
    waiting: list[Run] = []
    try:
        waiting = planned_cells(begun)
    except InputError as error:
        omitted.append(f"cells that have not begun: {error}")
    source = ", ".join(str(Path(root).absolute()) for root in roots)
    theory_files = (path for root in roots for path in find_theory(Path(root)))
    theory = read_theory(theory_files, omitted=omitted)
    found = keep_newest(runs, unfinished, omitted, source)
    return replace(found, waiting=tuple(waiting), theory=theory)


def keep_newest(
    runs: Iterable[Run], unfinished: Iterable[Run], omitted: Iterable[str], source: str
) -> Loaded:
    """Leave out runs that were repeated later with the same settings and seed.

    Args:
        runs: Finished runs.
        unfinished: Runs that did not finish.
        omitted: Lines about runs that were left out before.
        source: Where the runs are from, for messages.
    """
    newest: dict[str, Run] = {}
    lines = list(omitted)
    for run in sorted(runs, key=lambda run: (run.began, run.path)):
        key = _key(run)
        if key in newest:
            lines.append(f"{newest[key].path}: repeated later by {run.path}")
        newest[key] = run
    finished = {_key(run, with_data=False) for run in newest.values()}
    left = [run for run in unfinished if _key(run, with_data=False) not in finished]
    ordered = sorted(newest.values(), key=lambda run: run.path)
    return Loaded(tuple(ordered), tuple(left), tuple(sorted(lines)), source)


def check(run: Run) -> Run:
    """Return a finished run if it can be shown.

    Args:
        run: A run that is done or diverged.

    Raises:
        InputError: Its record or its rows do not tell what a figure must say; the message says which.
    """
    rows = run.rows
    if run.part("dataset").get("kind") not in ("real", "synthetic"):
        raise InputError("its run.json does not say whether its data is real or synthetic")
    if [row["epoch"] for row in rows] != sorted({row["epoch"] for row in rows}, key=lambda epoch: epoch or 0):
        raise InputError("its metrics.csv has an epoch twice, or out of order")
    if any((row["train_s"] or 0) < 0 for row in rows):
        raise InputError("its metrics.csv has seconds below zero")
    epochs = (run.part("config").get("trainer") or {}).get("epochs")
    last = rows[-1]["epoch"] if rows else 0
    if not run.diverged and (not rows or (isinstance(epochs, int) and last != epochs)):
        raise InputError(f"its metrics.csv ends at epoch {last} of {epochs}")
    return run


def _load(folder: RunFolder, name: str, record: Mapping[str, Any]) -> Run:
    if not folder.metrics_csv.is_file():
        raise InputError("its metrics.csv is missing")
    torn: list[str] = []
    rows = folder.read_metrics(report=torn.append)
    if torn:
        raise InputError("its metrics.csv is cut in mid-line")
    return check(Run(name, record, rows))


def _why_unfinished(record: Mapping[str, Any]) -> str:
    error = record.get("error")
    message = str(error.get("message") or "").strip() if isinstance(error, Mapping) else ""
    if record["state"] == "running":
        return "not finished (still running, or killed)"
    return f"{record['state']}" + (f" ({message.splitlines()[0]})" if message else "")


def _key(run: Run, *, with_data: bool = True) -> str:
    """Return what a repetition of a run has in common with it; an unfinished one may not know its data yet."""
    data = run.data_key if with_data else str(run.part("dataset").get("name"))
    device = run.part("device").get("name")
    # Three seeds by sweep=seeds are what the same seeds one by one are.
    sweep = None if run.sweep == "seeds" else run.sweep
    return json.dumps([run.setting_key(), run.seed, run.scale, run.experiment, sweep, data, device])
