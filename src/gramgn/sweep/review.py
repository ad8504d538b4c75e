"""What is to be done about each job of a sweep, decided from the records in its folder without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gramgn.app import Job, shown, split_paths
from gramgn.errors import InputError
from gramgn.records import ENDED, RunFolder, code_versions, differing

SHOWN_KEYS = 4
_PUT_BACK = "Put the file back, or move the job's folder away to run the job again"


@dataclass(frozen=True)
class Cell:
    """One job of a sweep and what is to be done about it.

    Attributes:
        job: The job as composed.
        environment: Variables that the configuration (`hydra.job.env_set`) asks to set.
        action: `new`; `resume` a run that exists; `restart` one that holds nothing worth keeping; `keep` a finished
            one; `reject` one that must not be touched.
        reason: Why it is rejected.
        record: The run.json that exists.
    """

    job: Job
    environment: Mapping[str, str]
    action: Literal["new", "resume", "restart", "keep", "reject"] = "new"
    reason: str = ""
    record: Mapping[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """The run folder, absolute."""
        return self.job.folder

    @property
    def key(self) -> str:
        """Name of the folder, which identifies the job within its sweep."""
        return self.folder.name

    @property
    def is_open(self) -> bool:
        """Whether the job is to be run."""
        return self.action in ("new", "resume", "restart")


def review(cell: Cell) -> Cell:
    """Return the cell with its action, from what lies in its folder."""
    folder = RunFolder(cell.folder)
    if not folder.run_json.is_file():
        if folder.metrics_csv.exists():
            lost = f"{shown(folder.run_json)} is gone, while metrics.csv is there"
            return replace(cell, action="reject", reason=f"{lost}. {_PUT_BACK}", record=None)
        return replace(cell, action="new", record=None)
    config = split_paths(cell.job.config)[0]
    try:
        record = folder.read_run("config")
        differences = differing(record["config"], config)
    except InputError as error:
        return replace(cell, action="reject", reason=f"{str(error).rstrip('.')}. {_PUT_BACK}", record=None)
    if differences:
        if record["state"] == "failed" and _holds_nothing(folder):
            return replace(cell, action="restart", record=record)
        return replace(cell, action="reject", reason=_other_config(cell, differences), record=record)
    if record["state"] == "done" and (damage := _lost_epochs(folder, config["trainer"]["epochs"])):
        return replace(cell, action="reject", reason=f"{damage}. {_PUT_BACK}", record=record)
    return replace(cell, action="keep" if record["state"] in ENDED else "resume", record=record)


def mixed_code(cells: Sequence[Cell], git: Mapping[str, Any]) -> str | None:
    """Return a note about jobs that ran with other code than the current one; None if there are none."""
    (now,) = code_versions({"git": git})
    others = Counter(
        version
        for cell in cells
        if cell.record is not None and cell.action in ("keep", "resume")
        for version in code_versions(cell.record)
        if version != now
    )
    if not others:
        return None
    listed = ", ".join(f"{count} with {version}" for version, count in others.most_common())
    return (
        f"note: mixed code versions in this sweep: {listed}, now {now}. Compare results of different code only "
        "if you know that the difference does not matter; name=<another> starts a new sweep"
    )


def _other_config(cell: Cell, differences: Mapping[str, tuple[Any, Any]]) -> str:
    named = [f"{key} ({then} then, {now} now)" for key, (then, now) in list(differences.items())[:SHOWN_KEYS]]
    more = f" and {len(differences) - SHOWN_KEYS} more" if len(differences) > SHOWN_KEYS else ""
    return (
        f"{shown(cell.folder)} was run with another configuration: {', '.join(named)}{more}. Nothing there is "
        "overwritten: start a new sweep with name=<another>, or move that folder away"
    )


def _lost_epochs(folder: RunFolder, epochs: int) -> str:
    """Return what a finished run lacks in metrics.csv, so that no figure could use it; an empty text for nothing."""
    try:
        rows = folder.read_metrics()
    except InputError as error:
        return str(error).rstrip(".")
    last = max((int(row["epoch"] or 0) for row in rows), default=0)
    return (
        ""
        if last >= epochs
        else f"the run is done, but {shown(folder.metrics_csv)} ends at epoch {last} of {epochs}"
    )


def _holds_nothing(folder: RunFolder) -> bool:
    """Return whether a run has neither a checkpoint nor a complete epoch."""
    checkpoints = folder.checkpoint_dir
    has_checkpoint = checkpoints.is_dir() and any(checkpoints.iterdir())
    return not has_checkpoint and not folder.read_metrics()
