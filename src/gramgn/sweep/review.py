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

_PUT_BACK = "Put the file back, or move the job's folder away to run the job again"


@dataclass(frozen=True)
class Cell:
    """One job of a sweep and what is to be done about it.

    `action` is to start a `new` run, to `resume` one, to `restart` one that holds nothing worth keeping, to `keep` a
    finished one, or to `reject` one that must not be touched.
    """

    job: Job
    environment: Mapping[str, str]  # variables that `hydra.job.env_set` asks to set
    action: Literal["new", "resume", "restart", "keep", "reject"] = "new"
    reason: str = ""  # why it is rejected
    record: Mapping[str, Any] | None = None  # the run.json that exists
    slurm_job: str | None = None  # what was submitted for it earlier, e.g. `"12_0"`

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
        if not folder.metrics_csv.exists():
            return replace(cell, action="new", record=None)
        lost = f"{shown(folder.run_json)} is gone, while metrics.csv is there"
        return replace(cell, action="reject", reason=f"{lost}. {_PUT_BACK}", record=None)
    config = split_paths(cell.job.config)[0]
    try:
        record, rows = folder.read_run("config"), folder.read_metrics()
    except InputError as error:
        return replace(cell, action="reject", reason=f"{str(error).rstrip('.')}. {_PUT_BACK}", record=None)
    last, epochs = max((row["epoch"] or 0 for row in rows), default=0), config["trainer"]["epochs"]
    if differences := differing(record["config"], config):
        has_checkpoint = any(folder.checkpoint_dir.glob("*"))
        if record["state"] == "failed" and not rows and not has_checkpoint:
            return replace(cell, action="restart", record=record)
        return replace(cell, action="reject", reason=_other_config(cell, differences), record=record)
    if record["state"] == "done" and last < epochs:
        lost = f"the run is done, but {shown(folder.metrics_csv)} ends at epoch {last} of {epochs}"
        return replace(cell, action="reject", reason=f"{lost}. {_PUT_BACK}", record=record)
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
    named = [f"{key} ({then} then, {now} now)" for key, (then, now) in differences.items()]
    listed = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
    return (
        f"{shown(cell.folder)} was run with another configuration: {listed}. Nothing there is "
        "overwritten: start a new sweep with name=<another>, or move that folder away"
    )
