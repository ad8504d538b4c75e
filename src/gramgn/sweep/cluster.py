"""The jobs of a sweep as jobs of Slurm: submitted by submitit, watched by squeue, and left alone by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gramgn.app import repository, shown
from gramgn.errors import InputError, counted, first_line
from gramgn.progress import say
from gramgn.scheduler import GONE, WAITING, is_live, job_states, pending_reasons
from gramgn.stopping import SIGNALS, deferred_signals
from gramgn.sweep.display import Outcome
from gramgn.sweep.node import work
from gramgn.sweep.options import Options
from gramgn.sweep.pool import TICK_S, Pool, Watcher, mend
from gramgn.sweep.resources import Resources
from gramgn.sweep.review import Cell

FOLDER = "slurm"
"""Folder in the sweep's folder with what submitit writes: scripts, jobs, results and logs."""

LONGEST_ARRAY = 1000
_FLAGS = ("partition", "account", "time", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem")
POLL_S = (1.0, 10.0)  # shortest and longest time between two looks at the queue
EXPLAINED_AFTER_S = 30.0  # for which nothing has moved in the queue
# Reasons for which a job waits that pass by themselves; others may last for ever.
_ORDINARY = ("None", "BeginTime", "Cleaning", "JobArrayTaskLimit", "Priority", "Resources")
PATIENCE_S = 10.0  # until a result on a shared disk is given up, once its job has ended
_STOPPED = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit before it was saved and requeued (hydra.launcher.time, signal_s)",
    "PREEMPTED": "had to make way for another job, and Slurm does not requeue it",
    "NODE_FAIL": "lost its node",
    "BOOT_FAIL": "had no node that started",
    "DEADLINE": "reached its deadline",
}
_FAILED = {
    "OUT_OF_MEMORY": "was killed because its memory ran out (hydra.launcher.mem)",
    GONE: "is not known to Slurm any more, and left no result",
}


@dataclass
class _Watched:
    """A job in the queue."""

    cell: Cell
    job: str
    state: str = "PENDING"
    since: float | None = None  # when it was first seen at work
    ended_at: float | None = None  # when it was first seen to have ended without a result


class SlurmPool:
    """Submits jobs, watches those that are queued or running already, and reports to its watcher."""

    def __init__(self, resources: Resources, git: dict[str, Any], watcher: Watcher, folder: Path) -> None:
        self._resources, self._watcher, self._folder = resources, watcher, folder
        self._local = Pool(Options(), git, watcher)

    def check(self, cells: Sequence[Cell]) -> list[str | None]:
        """Return what is wrong with each job, as `Pool.check`; jobs in the queue are not looked at again.

        Raises:
            InputError: Slurm does not answer or rejects the resources, or the jobs cannot be checked at all.
            StopRequested: A signal came.
        """
        states = _answered()
        fresh = [cell for cell in cells if not _is_queued(cell, states)]
        if not fresh:
            return [None] * len(cells)
        self._test()
        faults = self._local.check([_for_this_machine(cell) for cell in fresh])
        found = {cell.key: fault for cell, fault in zip(fresh, faults, strict=False)}
        return [found.get(cell.key) for cell in cells]

    def run(self, cells: Sequence[Cell]) -> None:
        """Submit jobs, except those in the queue, and watch all until they have ended.

        Raises:
            InputError: Slurm rejects a submission.
            StopRequested: A signal came; the jobs stay in the queue.
        """
        with deferred_signals() as stop:
            states = _answered()
            fresh = [cell for cell in cells if not _is_queued(cell, states)]
            jobs = [_Watched(cell, str(cell.slurm_job)) for cell in cells if _is_queued(cell, states)]
            if jobs:
                say(f"attached to {counted(len(jobs), 'job')} in Slurm's queue")
            for first in range(0, len(fresh), LONGEST_ARRAY):
                if stop.signum is None:
                    jobs += self._submit(fresh[first : first + LONGEST_ARRAY])
            looked_at, changed_at, explained_at = -POLL_S[1], time.monotonic(), 0.0
            while jobs and stop.signum is None:
                time.sleep(TICK_S)
                self._watcher.tick([job.cell for job in jobs if job.since is not None])
                now = time.monotonic()
                if now - looked_at < min(POLL_S[1], max(POLL_S[0], (now - changed_at) / 10)):
                    continue
                before = [(job.job, job.state) for job in jobs]
                jobs = self._look(jobs)
                looked_at = time.monotonic()
                if before != [(job.job, job.state) for job in jobs]:
                    changed_at = looked_at
                elif explained_at < changed_at < looked_at - EXPLAINED_AFTER_S:
                    explained_at = looked_at
                    _explain(jobs)
            if jobs:
                listed = " ".join(dict.fromkeys(job.job.partition("_")[0] for job in jobs))
                say(
                    f"left with Slurm, queued or running: {counted(len(jobs), 'job')}. The same command attaches to "
                    f"what is there; scancel {listed} cancels it"
                )
            stop.raise_if_set()

    def close(self) -> None:
        """Do nothing: jobs of Slurm outlive this command."""

    def _test(self) -> None:
        """Ask Slurm whether it would take the jobs, before anything is on disk.

        Raises:
            InputError: It would not.
        """
        known = self._resources.parameters("test")
        flags = {key.replace("_", "-"): value for key, value in known.items() if key in _FLAGS}
        flags |= known["additional_parameters"]
        words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items()]
        found = subprocess.run(
            ["sbatch", "--test-only", *words, "--wrap=true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        # A test fails where nodes are only down for a while; the jobs can wait for them.
        if found.returncode and "node configuration is not available" not in found.stderr:
            raise InputError(_rejected(found.stderr))

    def _submit(self, cells: Sequence[Cell]) -> list[_Watched]:
        """Submit jobs as one array, which no Ctrl-C interrupts."""
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = submitit.SlurmExecutor(self._folder / FOLDER, max_num_timeout=0)
        executor.update_parameters(**self._resources.parameters(self._folder.name))
        arguments = zip(
            *((replace(cell, record=None), repository(), self._resources.threads) for cell in cells),
            strict=True,
        )
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            found = executor.map_array(work, *arguments)
        except (FailedJobError, FailedSubmissionError) as error:
            raise InputError(_rejected(str(error))) from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        jobs = [_Watched(cell, job.job_id) for cell, job in zip(cells, found, strict=True)]
        self._watcher.queued([(job.cell, job.job) for job in jobs])
        say(
            f"submitted {counted(len(jobs), 'job')} to Slurm: {jobs[0].job}"
            + (f" to {jobs[-1].job}" if jobs[1:] else "")
        )
        return jobs

    def _look(self, jobs: Sequence[_Watched]) -> list[_Watched]:
        """Look at the queue, report what has changed, and return the jobs that have not ended."""
        states = job_states()
        if states is None:  # Slurm is busy, or restarted
            return list(jobs)
        going_on, has_failed = [], False
        for job in jobs:
            job.state = states.get(job.job, GONE)
            if job.state in WAITING and job.since is not None:
                job.since = None
                self._watcher.queued([(job.cell, job.job)])
            elif job.state not in (*WAITING, "CANCELLED", GONE) and job.since is None:
                job.since = time.monotonic()
                self._watcher.began(job.cell)
            outcome = self._outcome(job)
            if outcome is None:
                going_on.append(job)
                continue
            mend(job.cell, outcome)
            self._watcher.ended(job.cell, outcome)
            has_failed |= outcome.state == "failed"
        if has_failed and self._resources.on_failure == "stop" and going_on:
            names = [job.job for job in going_on]
            subprocess.run(["scancel", "--state=PENDING", *names], stdin=subprocess.DEVNULL, check=False)
        return going_on

    def _outcome(self, job: _Watched) -> Outcome | None:
        """Return how a job has ended; None if it has not, or if its result may still arrive."""
        if is_live(job.state) and job.state != "COMPLETING":
            job.ended_at = None
            return None
        now = time.monotonic()
        seconds = 0.0 if job.since is None else now - job.since
        if (result := self._result(job.job)) is not None:
            return Outcome(**result, seconds=seconds)
        if job.state == "COMPLETING":
            return None
        job.ended_at = job.ended_at or now
        has_worked = job.since is not None or job.state != "CANCELLED"
        if has_worked and now - job.ended_at < PATIENCE_S:
            return None
        if job.state in _STOPPED:
            return Outcome(
                "interrupted", f"Slurm job {job.job} {_STOPPED[job.state]}", None, seconds, exit_code=130
            )
        words = _FAILED.get(job.state, f"ended as {job.state} without a result")
        log = self._folder / FOLDER / f"{job.job}_0_log.out"
        where = f" (log: {shown(log)})" if log.is_file() else ""
        return Outcome("failed", f"Slurm job {job.job} {words}{where}", None, seconds, exit_code=1)

    def _result(self, name: str) -> dict[str, Any] | None:
        """Return what a job returned; None if it has not."""
        import submitit

        job: submitit.SlurmJob[dict[str, Any]] = submitit.SlurmJob(self._folder / FOLDER, name)
        if not job.paths.result_pickle.is_file():
            return None
        try:
            return job.result()
        except Exception as error:  # it could not even begin, e.g. because the node does not see gramgn
            trace = str(error).rpartition("\n-----")[0].strip()
            message = f"Slurm job {name} could not begin: {trace.rpartition(chr(10))[2] or first_line(error)}"
            return {"state": "failed", "exit_code": 1, "message": message, "val_loss": None}


def _is_queued(cell: Cell, states: Mapping[str, str]) -> bool:
    return cell.slurm_job is not None and is_live(states.get(cell.slurm_job, GONE))


def _explain(jobs: Sequence[_Watched]) -> None:
    """Report why jobs wait, where that may not pass by itself."""
    waiting = [job.job for job in jobs if job.state == "PENDING"]
    known = pending_reasons() if waiting else {}
    for reason, number in Counter(known[job] for job in waiting if job in known).items():
        if reason not in _ORDINARY:
            say(
                f"note: Slurm gives a reason why {counted(number, 'job')} may have to wait for long: {reason} "
                f"(scontrol show job {waiting[0].partition('_')[0]})"
            )


def _answered() -> dict[str, str]:
    states = job_states()
    if states is None:
        raise InputError(
            "squeue gets no answer from Slurm. Nothing was submitted: try again when sinfo works"
        )
    return states


def _rejected(text: str) -> str:
    """Return the message for an error of sbatch."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in text.strip().splitlines()]
    return (
        f"Slurm rejects the jobs: {lines[0] if lines else 'sbatch gives no reason'}. Correct hydra.launcher.<key>=, "
        "or conf/hydra/launcher/slurm.yaml; sinfo and `scontrol show partition` list what there is"
    )


def _for_this_machine(cell: Cell) -> Cell:
    """Return a job that can be checked without the devices of a node."""
    trainer = cell.job.config["trainer"]
    if str(trainer["device"]) == "cpu":
        return cell
    config = {**cell.job.config, "trainer": {**trainer, "device": "cpu", "compile": False}}
    return replace(cell, job=replace(cell.job, config=config))
