"""What is to be done about each job of a sweep, from what lies in its folder; needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gramgn.app._plan import split_paths
from gramgn.app._repository import shown
from gramgn.app._sweep._tasks import Cell, Planned
from gramgn.errors import InputError
from gramgn.records import RunFolder, code_version, code_versions, config_hash, differing

FINISHED = ("done", "diverged")
SHOWN_KEYS = 4
_PUT_BACK = "Put the file back, or move the job's folder away: then it is done anew"


def review(cell: Cell) -> Planned:
    """Decide whether a job is new, goes on, is kept as it is, or must not be touched."""
    config, _ = split_paths(cell.config)
    digest = config_hash(config)
    folder = RunFolder(cell.folder)
    if not folder.run_json.is_file():
        if folder.metrics_csv.exists():
            lost = f"{shown(folder.run_json)} is gone, while metrics.csv is there"
            return Planned(cell, "refuse", digest, f"{lost}. {_PUT_BACK}")
        return Planned(cell, "new", digest)
    try:
        record = folder.read_run("config")
    except InputError as error:
        return Planned(cell, "refuse", digest, f"{str(error).rstrip('.')}. {_PUT_BACK}")
    differences = differing(record["config"], config)
    if differences:
        if record["state"] == "failed" and _holds_nothing(folder):
            return Planned(cell, "anew", digest, record=record)
        return Planned(cell, "refuse", digest, _other_config(cell, differences), record)
    if record["state"] == "done" and (damage := _lost_epochs(folder, config["trainer"]["epochs"])):
        return Planned(cell, "refuse", digest, f"{damage}. {_PUT_BACK}", record)
    return Planned(cell, "keep" if record["state"] in FINISHED else "resume", digest, record=record)


def mixed_code(plans: Sequence[Planned], git: Mapping[str, Any]) -> str | None:
    """Return a line about jobs that ran, or began, with other code than runs now; None if there are none."""
    now = code_version(git)
    others = Counter(
        version
        for plan in plans
        if plan.record is not None and plan.action in ("keep", "resume")
        for version in code_versions(plan.record)
        if version != now
    )
    if not others:
        return None
    listed = ", ".join(f"{count} with {version}" for version, count in others.most_common())
    return (
        f"note: mixed code versions in this sweep: {listed}, now {now}. Results of different code are compared only "
        "if you know that the difference does not matter; name=<another> begins a new sweep"
    )


def _other_config(cell: Cell, differences: Mapping[str, tuple[Any, Any]]) -> str:
    told = [f"{key} ({then} then, {now} now)" for key, (then, now) in list(differences.items())[:SHOWN_KEYS]]
    more = f" and {len(differences) - SHOWN_KEYS} more" if len(differences) > SHOWN_KEYS else ""
    return (
        f"{shown(cell.folder)} was run with another configuration: {', '.join(told)}{more}. Nothing there is "
        "overwritten: begin a new sweep with name=<another>, or move that folder away"
    )


def _lost_epochs(folder: RunFolder, epochs: int) -> str:
    """Say that a run that is done lacks its last epoch in metrics.csv, so that no figure can use it; "" if not."""
    try:
        rows = folder.read_metrics(report=lambda message: None)
    except InputError as error:
        return str(error).rstrip(".")
    last = max((int(row["epoch"] or 0) for row in rows), default=0)
    if last >= epochs:
        return ""
    return f"the run is done, but {shown(folder.metrics_csv)} ends at epoch {last} of {epochs}"


def _holds_nothing(folder: RunFolder) -> bool:
    """Tell whether a run has neither a checkpoint nor a whole epoch."""
    checkpoints = folder.checkpoint_dir
    return not (checkpoints.is_dir() and any(checkpoints.iterdir())) and not folder.read_metrics(
        report=lambda message: None
    )
