"""One command's work on a sweep: look at what is there, check what is to be done, do it, and report how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gramgn.app import repository, shown
from gramgn.errors import ConfigError, InputError, counted
from gramgn.locks import holder, is_locked, locked
from gramgn.progress import say
from gramgn.records import (
    ENDED,
    LOCK_FILE,
    RunFolder,
    SweepFolder,
    git_state,
    idle_epochs_note,
    is_incidental,
    override_key,
    portable,
    varying,
    versions,
)
from gramgn.scheduler import is_live, job_states
from gramgn.stopping import deferred_signals
from gramgn.sweep.axes import axes_of, grid_text
from gramgn.sweep.cluster import SlurmPool
from gramgn.sweep.display import Display, Outcome, closing_table
from gramgn.sweep.job import GRACE_S
from gramgn.sweep.options import Options
from gramgn.sweep.pool import Pool, start_server
from gramgn.sweep.resources import Resources
from gramgn.sweep.review import Cell, mixed_code, review
from gramgn.sweep.summary import draw_heatmap
from gramgn.tracking import TrackingConfig, log_summary

LISTED = 10


class Sweep:
    """Holds a sweep's folder for this command, over all launches of its sweeper.

    The folder is created when the first job is about to run. `mirrored` says whether jobs have a W&B run.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], options: Options | Resources, *, mirrored: bool
    ) -> None:
        self.folder = SweepFolder(folder)
        self.options = options
        self.cells: dict[str, Cell] = {}
        self.outcomes: dict[str, Outcome] = {}
        self._labels: dict[str, str] = {}
        self._command = list(command)
        self._git = git_state(repository())
        self._pool: Pool | SlurmPool
        if isinstance(options, Resources):
            self._pool = SlurmPool(options, self._git, self, self.folder.path)
        else:
            self._pool = Pool(options, self._git, self)
        self._display = Display()
        self._lock = ExitStack()
        self._is_ours = False
        # The content of sweep.json; jobs of earlier commands stay listed.
        self._record = self.folder.read() if self.folder.sweep_json.is_file() else {"cells": []}
        self._listed: dict[str, dict[str, Any]] = {cell["folder"]: cell for cell in self._record["cells"]}
        self._start: dict[str, Any] | None = None
        if not self._listed or any(cell.get("state") not in ENDED for cell in self._listed.values()):
            start_server(mirrored=mirrored)

    @property
    def has_begun(self) -> bool:
        """Whether this command had something to do."""
        return self._start is not None

    @property
    def has_failed(self) -> bool:
        """Whether a job failed, so that `on_failure=stop` ends the sweep."""
        return any(outcome.state in ("failed", "rejected") for outcome in self.outcomes.values())

    def launch(self, cells: Sequence[Cell]) -> None:
        """Run jobs, except those that are finished; `outcomes` then holds the state of each.

        Raises:
            InputError: None of them can be run, or with `on_failure=stop` not all; nothing is on disk then.
            StopRequested: A signal came.
        """
        is_first = not self.outcomes
        if self.folder.path.is_dir():
            self._take()
        cells = [
            review(replace(cell, slurm_job=self._listed.get(cell.key, {}).get("job")))
            for cell in _unique(cells)
        ]
        self.cells |= {cell.key: cell for cell in cells}
        # What distinguishes each job among all of this command.
        texts = varying([cell.job.overrides for cell in self.cells.values()])
        self._labels = {
            key: text or key.rpartition("-")[0] for key, text in zip(self.cells, texts, strict=True)
        }
        axes = axes_of([cell.job.overrides for cell in self.cells.values()])
        if is_first:
            say(f"{grid_text(axes, len(cells))}\nsweep folder: {shown(self.folder.path)}")
        else:
            say(counted(len(cells), "more job"))
        if kept := [cell for cell in cells if cell.action == "keep"]:
            say(f"kept: {len(kept)} of {counted(len(cells), 'job')}, finished already")
        if note := mixed_code(cells, self._git):
            say(note)
        self._check_queue(cells)
        problems = self._problems(cells)
        if is_first and problems:
            self._reject(cells, problems)
        todo = [cell for cell in cells if cell.is_open]
        if todo and not self._is_ours:
            self._take()
            if any(review(cell).action != cell.action for cell in cells):
                raise InputError(
                    f"another process has worked on {shown(self.folder.path)} meanwhile. Repeat the command"
                )
        self._note(cells)
        if todo or (self._is_ours and not self.folder.sweep_json.is_file()):
            self._begin(cells, axes)
        if todo and not (self.has_failed and self.options.on_failure == "stop"):
            self._pool.run(todo)

    def conclude(self, *, mirror: bool) -> int:
        """Print the table of all jobs, mirror it to W&B on request, and return 1 if a job is not done or diverged.

        Raises:
            StopRequested: A signal came meanwhile.
        """
        if self.outcomes:
            rows = [(self._labels[key], self.outcomes[key]) for key in self.cells]
            say(closing_table(shown(self.folder.path), rows))
        if mirror and self.has_begun:
            first = next(iter(self.cells.values()))
            log_summary(self.folder.path, TrackingConfig(**first.job.config["tracking"]), draw_heatmap)
        return int(any(outcome.state not in ENDED for outcome in self.outcomes.values()))

    def close(self) -> None:
        """End all processes and release the folder."""
        with deferred_signals():
            self._pool.close()
            self._lock.close()

    def _take(self) -> None:
        """Lock the folder for this process, and wait until jobs of a killed sweep here have stopped by themselves.

        Raises:
            InputError: Another process works on the sweep.
        """
        if self._is_ours:
            return
        self.folder.path.mkdir(parents=True, exist_ok=True)
        file = self.folder.path / LOCK_FILE
        other = holder(file)
        how = f"kill -INT {other.pid if other else '<its number>'}"
        if other is not None and not other.is_here:
            how = f"ssh {other.host} {how}"
        self._lock.enter_context(
            locked(
                file,
                f"the sweep in {shown(self.folder.path)} is running already, as {other or 'another process'}. "
                f"Wait for it, or stop it with: {how}",
            )
        )
        self._is_ours = True
        if isinstance(self._pool, SlurmPool):
            return
        end = time.monotonic() + GRACE_S + 5
        while time.monotonic() < end and any(map(is_locked, self.folder.path.glob("*/.lock"))):
            time.sleep(0.1)

    def _check_queue(self, cells: Sequence[Cell]) -> None:
        """Reject to run here what is in Slurm's queue.

        Raises:
            InputError: One of the jobs is there.
        """
        submitted = {cell.slurm_job for cell in cells if cell.is_open and cell.slurm_job}
        if isinstance(self._pool, SlurmPool) or not submitted:
            return
        if queued := [
            job for job, state in (job_states() or {}).items() if job in submitted and is_live(state)
        ]:
            raise InputError(
                f"{counted(len(queued), 'job')} of {shown(self.folder.path)} in Slurm's queue: watch them with "
                f"hydra/launcher=slurm, or cancel them first: scancel {' '.join(queued)}"
            )

    def _problems(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Return why jobs cannot be run, by folder: another configuration is there, or theirs is faulty."""
        problems = {cell.key: cell.reason for cell in cells if cell.action == "reject"}
        todo = [cell for cell in cells if cell.is_open]
        faults = self._pool.check(todo) if todo else []
        return problems | {cell.key: fault for cell, fault in zip(todo, faults, strict=False) if fault}

    def _reject(self, cells: Sequence[Cell], problems: Mapping[str, str]) -> None:
        """Raise one message for all problems, unless other jobs can be run and `on_failure` is `continue`."""
        is_able = any(cell.action != "keep" and cell.key not in problems for cell in cells)
        if is_able and self.options.on_failure == "continue":
            return
        messages = list(dict.fromkeys(problems.values()))
        if len(messages) == 1 and len(problems) == len(cells):
            same = f"\n(the same for all {len(cells)} jobs)" if len(cells) > 1 else ""
            raise InputError(f"{messages[0]}{same}")
        faulty = [f"  {self._labels[key]}: {problem}" for key, problem in problems.items()]
        lines = [f"{len(faulty)} of {len(cells)} jobs cannot be run:", *faulty[:LISTED]]
        if len(faulty) > LISTED:
            lines.append(f"  and {len(faulty) - LISTED} more")
        if is_able:
            lines.append("on_failure=continue runs the others")
        raise InputError("\n".join(lines))

    def _note(self, cells: Sequence[Cell]) -> None:
        """Note the state of each job before any of them runs."""
        for cell in cells:
            record = cell.record or {}
            if cell.action == "keep":
                best = (record.get("best") or {}).get("val_loss") if record["state"] == "done" else None
                message = str((record.get("error") or {}).get("message") or "")
                message = message or idle_epochs_note(RunFolder(cell.folder).read_metrics())
                outcome = Outcome(str(record["state"]), message, best, kept=True)
            elif cell.action == "reject":
                outcome = Outcome("rejected", cell.reason, exit_code=2)
                say(f"rejected: {cell.reason}")
            else:
                outcome = Outcome("waiting")
            self.outcomes[cell.key] = outcome
        self._display.expect(len(cells), sum(not cell.is_open for cell in cells))

    def _begin(self, cells: Sequence[Cell], axes: Mapping[str, Sequence[str]]) -> None:
        """Write this command and all of its jobs to sweep.json, before the first of them runs."""
        if self._start is None:
            self._start = {"time_utc": _now(), "git": self._git, "versions": versions()}
            self._record["starts"] = [*self._record.get("starts", []), self._start]
        listed = self._listed | {cell.key: self._entry(cell) for cell in cells}
        order = dict.fromkeys([*self.cells, *listed])
        self._listed = {key: listed[key] for key in order if key in listed}
        self._record |= {
            "name": self.folder.path.name,
            "command": portable(self._command, repository()),
            "on_failure": self.options.on_failure,
            "n_jobs": self.options.num_at_once,
            "threads_per_job": self.options.threads,
            "axes": axes,
        }
        self._write()

    def _entry(self, cell: Cell) -> dict[str, Any]:
        entry = dict.fromkeys(("error", "exit_code", "started", "ended")) | {"state": "waiting"}
        entry |= self._listed.get(cell.key, {})
        entry |= {"folder": cell.key, "overrides": portable(list(cell.job.overrides), repository())}
        if cell.record is not None and not cell.is_open:
            entry["state"] = cell.record["state"]
        if cell.action == "reject":
            entry["error"] = portable(cell.reason, repository())
        return entry

    def queued(self, jobs: Sequence[tuple[Cell, str]]) -> None:
        """Record the names of jobs in Slurm's queue, and show those that wait there once more."""
        for cell, job in jobs:
            entry = self._listed[cell.key]
            if entry["state"] == "running":
                self._display.requeued(self._labels[cell.key])
            entry |= {"state": "waiting", "job": job}
        self._write()

    def began(self, cell: Cell) -> None:
        """Record and show that a job starts."""
        self.outcomes[cell.key] = Outcome("running")
        self._display.started(self._labels[cell.key])
        self._change(cell, state="running", started=_now(), ended=None, error=None, exit_code=None)

    def ended(self, cell: Cell, outcome: Outcome) -> None:
        """Record and show how a job ended."""
        self._display.ended(self._labels[cell.key], cell.folder, outcome)
        self.outcomes[cell.key] = outcome
        error = portable(outcome.message, repository()) or None
        self._change(cell, state=outcome.state, error=error, exit_code=outcome.exit_code, ended=_now())

    def tick(self, running: Sequence[Cell]) -> None:
        """Show how far the running jobs are."""
        self._display.tick([(cell.folder, self._labels[cell.key]) for cell in running])

    def _change(self, cell: Cell, **entries: Any) -> None:
        self._listed[cell.key] |= entries
        self._write()

    def _write(self) -> None:
        self.folder.write({**self._record, "cells": list(self._listed.values())})


def _unique(cells: Sequence[Cell]) -> list[Cell]:
    """Return the jobs, each once.

    Raises:
        ConfigError: Two different jobs have the same folder.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        other = found.setdefault(cell.key, cell)
        if other.job.config != cell.job.config:
            raise ConfigError(_same_folder(cell, other))
    return list(found.values())


def _same_folder(cell: Cell, other: Cell) -> str:
    keys = sorted({override_key(each) for each in set(cell.job.overrides) ^ set(other.job.overrides)})
    if keys == ["name"]:
        return "name= names the whole sweep and has one value; give one command per name"
    if all(map(is_incidental, keys)):
        return (
            f"{', '.join(keys)} changes no result, so jobs that differ in nothing else are one job with one folder. "
            "Choose one value, or give one command per value, each with another name="
        )
    return (
        f"two different jobs have the same folder {shown(cell.folder)}: {' '.join(other.job.overrides)} and "
        f"{' '.join(cell.job.overrides)}. Do not set hydra.sweep.subdir, or include what distinguishes them"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
