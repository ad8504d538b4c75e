"""One command's work on a sweep: look at what is there, check what is to be done, do it, and say how it ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gramgn.app._lock import take_lock
from gramgn.app._repository import repository, shown
from gramgn.app._sweep._axes import axes_of, grid_text
from gramgn.app._sweep._display import Display, Outcome, closing_table
from gramgn.app._sweep._options import Options
from gramgn.app._sweep._pool import Pool
from gramgn.app._sweep._record import SweepRecord, now_utc
from gramgn.app._sweep._review import FINISHED, mixed_code, review
from gramgn.app._sweep._tasks import OUTPUT_FILE, Cell, Planned
from gramgn.errors import ConfigError, InputError
from gramgn.records import (
    LOCK_FILE,
    SweepFolder,
    git_state,
    is_incidental,
    override_key,
    portable,
    varying,
    versions,
)

# torch's compiler is imported by each of its optimizers, compiled or not.
MODULES = (
    "gramgn.app._sweep._child",
    "gramgn.data.synthetic",
    "gramgn.models",
    "gramgn.optim",
    "hydra.utils",
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.serialization",
)
TO_DO = ("new", "resume", "anew")
LISTED = 10


class Sweep:
    """Holds a sweep's folder for this command, over all launches of its sweeper.

    Args:
        folder: The sweep's folder; it is made when the first job is about to run.
        command: What was written on the command line.
        options: How to run the jobs.
        mirrored: Whether jobs have a W&B run.
    """

    def __init__(self, folder: Path, command: Sequence[str], options: Options, *, mirrored: bool) -> None:
        self.folder = SweepFolder(folder)
        self._command, self._options = list(command), options
        self._git = git_state(repository())
        modules = (*MODULES, "gramgn.tracking._wandb", "wandb") if mirrored else MODULES
        self._pool = Pool(options, modules, self._git)
        self._display = Display(options.num_at_once)
        self._lock: int | None = None
        self._record: SweepRecord | None = None
        self.cells: dict[str, Cell] = {}
        self.outcomes: dict[str, Outcome] = {}

    @property
    def on_failure(self) -> str:
        """``"continue"`` or ``"stop"``."""
        return self._options.on_failure

    @property
    def exit_code(self) -> int:
        """0 if every job is done or diverged, else 1."""
        return int(any(outcome.state not in FINISHED for outcome in self.outcomes.values()))

    @property
    def has_begun(self) -> bool:
        """Whether this command had something to do."""
        return self._record is not None

    @property
    def has_failed(self) -> bool:
        """Whether a job failed, so that ``on_failure=stop`` ends the sweep."""
        return any(outcome.state in ("failed", "refused") for outcome in self.outcomes.values())

    def warm_up(self) -> None:
        """Start to import what jobs need, unless all jobs that the folder knows of are finished."""
        record = SweepRecord(self.folder)
        if not record.states or any(state not in FINISHED for state in record.states):
            self._pool.warm_up()

    def launch(self, cells: Sequence[Cell]) -> None:
        """Do jobs, or keep them where they are finished; :attr:`outcomes` then has how each of them stands.

        Raises:
            InputError: If none of them can be done, or with ``on_failure=stop`` any cannot; nothing is on disk then.
            StopRequested: If a signal came.
        """
        unique = _unique(cells)
        is_first = not self.outcomes
        if self.folder.path.is_dir():
            self._take()
        plans = [review(cell) for cell in unique]
        todo = [plan for plan in plans if plan.action in TO_DO]
        axes = axes_of([cell.overrides for cell in [*self.cells.values(), *unique]])
        if is_first:
            self._display.say(f"{grid_text(axes, len(unique))}\nsweep folder: {shown(self.folder.path)}")
        else:
            self._display.say(f"{len(unique)} more job{'s' * (len(unique) != 1)}")
        self._tell_kept(plans)
        problems = self._problems(plans, todo)
        self._refuse(plans, problems, is_first=is_first)
        is_unlisted = self.folder.path.is_dir() and not self.folder.sweep_json.is_file()
        if todo:
            self._take_as_planned(plans)
        self.cells |= {cell.key: cell for cell in unique}
        self._note(plans, problems)
        if todo or is_unlisted:
            self._begin(plans, axes)
        if todo:
            self._do(todo, problems)

    def _problems(self, plans: Sequence[Planned], todo: Sequence[Planned]) -> dict[str, str]:
        """Return why jobs cannot be done, by folder name: another configuration is there, or they are faulty."""
        problems = {plan.cell.key: plan.reason for plan in plans if plan.action == "refuse"}
        faults = (self._pool.check(todo) if todo else None) or []
        return problems | {plan.cell.key: fault for plan, fault in zip(todo, faults, strict=False) if fault}

    def _do(self, todo: Sequence[Planned], problems: Mapping[str, str]) -> None:
        for plan in todo:
            if plan.cell.key in problems:
                self._fail(plan, problems[plan.cell.key])
        runnable = [plan for plan in todo if plan.cell.key not in problems]
        if runnable and not (self.has_failed and self._options.on_failure == "stop"):
            labels = self._labels([plan.cell for plan in runnable])
            self._pool.run(runnable, labels, self._display, self._began, self._ended)

    def table(self) -> str:
        """Return the closing table, or an empty text where no job got as far as being planned."""
        if not self.outcomes:
            return ""
        labels = self._labels(list(self.cells.values()))
        rows = [(label, self.outcomes[key]) for key, label in zip(self.cells, labels, strict=True)]
        return closing_table(shown(self.folder.path), rows)

    def close(self) -> None:
        """End all processes and let go of the folder."""
        self._pool.close()
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        if self._lock is None:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.folder.path / LOCK_FILE, f"the sweep in {self.folder.path}")
            self._pool.hold(self._lock)

    def _take_as_planned(self, plans: Sequence[Planned]) -> None:
        """Take the folder; what was planned before it was ours must still be so.

        Raises:
            InputError: If another process works on the sweep, or has done so meanwhile.
        """
        if self._lock is not None:
            return
        self._take()
        if any(review(plan.cell).action != plan.action for plan in plans):
            raise InputError(
                f"another process has worked on {shown(self.folder.path)} meanwhile. Give the command again"
            )

    def _tell_kept(self, plans: Sequence[Planned]) -> None:
        labels = self._labels([plan.cell for plan in plans])
        told = [
            f"kept: {label} is {(plan.record or {})['state']} already"
            for plan, label in zip(plans, labels, strict=True)
            if plan.action == "keep"
        ]
        for each in told[:LISTED]:
            self._display.say(each)
        if len(told) > LISTED:
            self._display.say(f"kept: {len(told) - LISTED} more are finished already")
        if line := mixed_code(plans, self._git):
            self._display.say(line)

    def _refuse(self, plans: Sequence[Planned], problems: dict[str, str], *, is_first: bool) -> None:
        """Stop here if nothing could be done, or something could not and that is to end the sweep."""
        able = [plan for plan in plans if plan.action != "keep" and plan.cell.key not in problems]
        if not problems or not is_first or (able and self._options.on_failure == "continue"):
            return
        raise InputError(self._summary(plans, problems, advice=bool(able)))

    def _summary(self, plans: Sequence[Planned], problems: dict[str, str], *, advice: bool) -> str:
        """Return one message for all problems; what is the same for all jobs is said once."""
        messages = list(dict.fromkeys(problems.values()))
        if len(messages) == 1 and len(problems) == len(plans):
            return messages[0] + (f"\n(the same for all {len(plans)} jobs)" if len(plans) > 1 else "")
        labels = self._labels([plan.cell for plan in plans])
        faulty = [
            f"  {label}: {problems[plan.cell.key]}"
            for plan, label in zip(plans, labels, strict=True)
            if plan.cell.key in problems
        ]
        lines = [f"{len(faulty)} of {len(plans)} jobs cannot be run:", *faulty[:LISTED]]
        if len(faulty) > LISTED:
            lines.append(f"  and {len(faulty) - LISTED} more")
        if advice:
            lines.append("on_failure=continue runs the others")
        return "\n".join(lines)

    def _note(self, plans: Sequence[Planned], problems: dict[str, str]) -> None:
        """Enter how each job stands before any runs."""
        kept_seconds = []
        for plan in plans:
            record = plan.record or {}
            if plan.action == "keep":
                seconds = (record.get("time") or {}).get("wall_s") or 0.0
                kept_seconds.append(seconds)
                best = (record.get("best") or {}).get("val_loss") if record["state"] == "done" else None
                message = str((record.get("error") or {}).get("message") or "")
                outcome = Outcome(str(record["state"]), message, best, seconds, kept=True)
            elif plan.action == "refuse":
                outcome = Outcome("refused", plan.reason, exit_code=2)
                self._display.say(f"refused: {plan.reason}")
            else:
                outcome = Outcome("waiting")
            self.outcomes[plan.cell.key] = outcome
        states = [self.outcomes[plan.cell.key].state for plan in plans]
        self._display.expect({state: states.count(state) for state in set(states)}, kept_seconds)

    def _begin(self, plans: Sequence[Planned], axes: dict[str, list[str]]) -> None:
        start: dict[str, Any] | None = None
        if self._record is None:
            self._record = SweepRecord(self.folder)
            start = {"time_utc": now_utc(), "git": self._git, "versions": versions()}
        self._record.begin(
            plans,
            list(self.cells),
            axes,
            start,
            command=portable(self._command, repository()),
            on_failure=self._options.on_failure,
            n_jobs=self._options.num_at_once,
            threads_per_job=self._options.threads,
        )

    def _began(self, plan: Planned) -> None:
        assert self._record is not None
        begun = {"state": "running", "started": now_utc()}
        self._record.change(plan.cell.key, **begun, ended=None, error=None, exit_code=None)

    def _ended(self, plan: Planned, outcome: Outcome) -> None:
        assert self._record is not None
        self.outcomes[plan.cell.key] = outcome
        self._record.change(
            plan.cell.key,
            state=outcome.state,
            error=portable(outcome.message, repository()) or None,
            exit_code=outcome.exit_code,
            ended=now_utc(),
        )

    def _fail(self, plan: Planned, fault: str) -> None:
        """Enter a job that was found faulty before it began, with a log of its own."""
        assert self._record is not None
        self.outcomes[plan.cell.key] = Outcome("failed", fault, exit_code=2)
        self._display.expect({"waiting": -1, "failed": 1}, [])
        log = plan.cell.folder / OUTPUT_FILE
        (label,) = self._labels([plan.cell])
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"--- {now_utc()}: {' '.join(plan.cell.overrides)}\nerror: {fault}\n")
        except OSError as error:
            raise InputError(f"cannot write {log}: {error.strerror or error}") from error
        self._display.say(f"failed   {label}  {fault} (log: {shown(log)})")
        self._record.change(plan.cell.key, state="failed", error=portable(fault, repository()), exit_code=2)

    def _labels(self, cells: Sequence[Cell]) -> list[str]:
        """Return what distinguishes jobs among all of this command."""
        everything = {**self.cells, **{cell.key: cell for cell in cells}}
        found = dict(zip(everything, varying([cell.overrides for cell in everything.values()]), strict=True))
        return [found[cell.key] or cell.key.rpartition("-")[0] for cell in cells]


def _unique(cells: Sequence[Cell]) -> list[Cell]:
    """Return the jobs, each once.

    Raises:
        ConfigError: If two different ones have the same folder.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        other = found.setdefault(cell.key, cell)
        if other.config != cell.config:
            raise ConfigError(_same_folder(cell, other))
    return list(found.values())


def _same_folder(cell: Cell, other: Cell) -> str:
    keys = sorted({override_key(each) for each in set(cell.overrides) ^ set(other.overrides)})
    if keys == ["name"]:
        return "name= names the whole sweep and has one value; give a command for each name"
    if all(map(is_incidental, keys)):
        return (
            f"{', '.join(keys)} changes no result, so jobs that differ in nothing else are one job with one folder. "
            "Choose one value, or give a command for each with a name= of its own"
        )
    return (
        f"two different jobs have the same folder {shown(cell.folder)}: {' '.join(other.overrides)} and "
        f"{' '.join(cell.overrides)}. Leave hydra.sweep.subdir as it is, or let it tell them apart"
    )
