"""The child processes of a sweep: a fresh one per job, forked from a server that has only imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, Protocol

from gramgn.app import repository
from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import RunFolder
from gramgn.stopping import SIGNALS, StopAtOnce, deferred_signals
from gramgn.sweep.display import Outcome
from gramgn.sweep.job import GRACE_S, WITHHELD, Task, perform
from gramgn.sweep.options import Options
from gramgn.sweep.review import Cell

TICK_S = 0.1
KILL_WAIT_S = 5.0
KILLED = "killed when the sweep was stopped; resuming starts after its last whole epoch"


class Watcher(Protocol):
    """Whom a pool reports to."""

    def queued(self, jobs: Sequence[tuple[Cell, str]]) -> None:
        """Jobs are in the queue of a cluster, with their names there, for the first time or again."""

    def began(self, cell: Cell) -> None:
        """A job is about to start."""

    def ended(self, cell: Cell, outcome: Outcome) -> None:
        """A job has ended."""

    def tick(self, running: Sequence[Cell]) -> None:
        """Some time has passed."""


def start_server(*, mirrored: bool) -> None:
    """Start the process that jobs are forked from; it imports in the background what they need.

    It inherits the signals that stop a program blocked, and so do its children until they have handlers: a Ctrl-C on a
    terminal reaches only the process that runs the sweep. `mirrored` says whether jobs have a W&B run.
    """
    forkserver.set_forkserver_preload(["gramgn.sweep.preload", *(["wandb"] if mirrored else [])])
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # unblocks some of them
    # The server does not take over sys.path, where train.py has put this checkout.
    before = os.environ.get("PYTHONPATH")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class Child:
    """A process that does a task; `slot` is its place among the jobs that run at a time."""

    def __init__(self, task: Task, slot: int = 0) -> None:
        self.cell, self.slot = task.cells[0], slot
        self.since = time.monotonic()
        self.result: dict[str, Any] | None = None
        context = multiprocessing.get_context("forkserver")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=perform, args=(task, sender))
        self._process.start()
        sender.close()

    @property
    def handles(self) -> list[Any]:
        """What becomes ready when the child has a result or has ended."""
        return [self._process.sentinel] if self._receiver.closed else [self._process.sentinel, self._receiver]

    def has_ended(self) -> bool:
        """Take the result if it has come; return whether the process has ended."""
        is_over = not self._process.is_alive()
        if not self._receiver.closed and self._receiver.poll():
            with suppress(EOFError, OSError):  # it was killed before, or while, it sent a result
                self.result = self._receiver.recv()
            self._receiver.close()
        return is_over

    def reason(self) -> str:
        """Return how the process ended without a result."""
        status = self._process.exitcode or 0
        if status == -signal.SIGKILL:
            return "killed by SIGKILL (out of memory?)"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"ended without a result, with exit code {status}"

    def signal(self, signum: int) -> None:
        """Send a signal to the process, SIGKILL also to all that it has started."""
        process = self._process.pid
        assert process is not None
        # macOS reports a group that has only ended processes as PermissionError.
        with suppress(ProcessLookupError, PermissionError):
            if signum == signal.SIGKILL:
                self._process.kill()  # it may not have a group yet
                os.killpg(process, signum)
            else:
                os.kill(process, signum)


class Pool:
    """Runs checks and jobs, each in a fresh process, and reports to its watcher."""

    def __init__(self, options: Options, git: dict[str, Any], watcher: Watcher) -> None:
        self._options, self._git, self._watcher = options, git, watcher
        self._gpus: tuple[str, ...] = options.gpus or ()
        self._running: list[Child] = []

    def check(self, cells: Sequence[Cell]) -> list[str | None]:
        """Return what is wrong with each job, as far as that is known without its data; None for nothing.

        The list is empty if the checking process was killed: then each job finds out for itself.

        Raises:
            InputError: The jobs cannot be checked at all.
            StopRequested: A signal came.
        """
        with deferred_signals() as stop:  # interrupted while it starts, the child would be known to nobody
            child = Child(self._task(cells, dict(os.environ), is_check=True))
        try:
            stop.raise_if_set()
            while not child.has_ended():
                connection.wait(child.handles)
        finally:
            child.signal(signal.SIGKILL)
        if child.result is None:
            return []
        if child.result["state"] != "done":
            raise InputError(child.result["message"])
        self._gpus = self._options.gpus_of_jobs(child.result["num_gpus"])
        if 0 < len(self._gpus) < self._options.num_at_once:
            say(f"note: {self._options.num_at_once} jobs at a time share {len(self._gpus)} CUDA devices")
        faults: list[str | None] = child.result["faults"]
        return [fault or self._misplaced(cell) for fault, cell in zip(faults, cells, strict=True)]

    def _misplaced(self, cell: Cell) -> str | None:
        device = cell.job.config["trainer"]["device"]
        if not self._gpus or not str(device).startswith("cuda:"):
            return None
        return (
            f"trainer.device={device} names a device, while the launcher hands out one to each job. "
            "Give trainer.device=cuda, or hydra.launcher.gpus and n_jobs=1"
        )

    def run(self, cells: Sequence[Cell]) -> None:
        """Run jobs until all have ended, or one has failed and `on_failure` is `stop`.

        Raises:
            StopRequested: A signal came; the children have ended by then.
        """
        waiting = deque(cells)
        slots = list(range(self._options.num_at_once))
        with deferred_signals() as stop:
            try:
                while (waiting or self._running) and stop.signum is None:
                    while waiting and slots and stop.signum is None:
                        self._start(waiting.popleft(), slots.pop(0))
                    for child, outcome in self._wait(stopping=False):
                        slots = sorted([*slots, child.slot])
                        if outcome.state == "failed" and self._options.on_failure == "stop":
                            waiting.clear()
                if stop.signum is not None:
                    if self._running:
                        say(f"stopping {len(self._running)} running, at most {GRACE_S:.0f} s")
                    self._stop(stop.signum)
            except StopAtOnce as again:
                self._stop(signal.SIGKILL)
                raise again from None
            except Exception:  # a full disk, or no process for a further job
                self._stop(signal.SIGTERM)
                raise
            stop.raise_if_set()

    def close(self) -> None:
        """Kill whatever still runs."""
        for child in self._running:
            child.signal(signal.SIGKILL)

    def _task(self, cells: Sequence[Cell], environment: dict[str, str], *, is_check: bool) -> Task:
        kept = {name: value for name, value in environment.items() if name not in WITHHELD}
        return Task(tuple(cells), is_check, repository(), kept, self._options.threads, self._git)

    def _start(self, cell: Cell, slot: int) -> None:
        environment = os.environ | dict(cell.environment)
        if self._gpus and not str(cell.job.config["trainer"]["device"]).startswith("cpu"):
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        self._watcher.began(cell)
        self._running.append(Child(self._task([cell], environment, is_check=False), slot))

    def _wait(self, *, stopping: bool) -> list[tuple[Child, Outcome]]:
        """Wait a moment; record and return the jobs that ended meanwhile."""
        connection.wait([handle for child in self._running for handle in child.handles], TICK_S)
        found = [(child, _outcome(child, stopping=stopping)) for child in self._running if child.has_ended()]
        self._running = [child for child in self._running if child not in [each for each, _ in found]]
        for child, outcome in found:
            self._watcher.ended(child.cell, outcome)
        self._watcher.tick([child.cell for child in self._running])
        return found

    def _stop(self, signum: int) -> None:
        """Send a signal to all children and wait for them; kill those that take too long."""
        orders = ((signum, GRACE_S), (int(signal.SIGKILL), KILL_WAIT_S))
        for order, seconds in orders[signum == signal.SIGKILL :]:
            for child in self._running:
                child.signal(order)
            end = time.monotonic() + seconds
            while self._running and time.monotonic() < end:
                self._wait(stopping=True)


def _outcome(child: Child, *, stopping: bool) -> Outcome:
    """Return how a job ended."""
    # What it started itself would keep its files open and locked.
    child.signal(signal.SIGKILL)
    seconds = time.monotonic() - child.since
    if child.result is not None:
        outcome = Outcome(**child.result, seconds=seconds)
    else:
        state, exit_code = ("interrupted", 130) if stopping else ("failed", 1)
        reason = KILLED if stopping else child.reason()
        outcome = Outcome(state, reason, seconds=seconds, exit_code=exit_code)
    mend(child.cell, outcome)
    return outcome


def mend(cell: Cell, outcome: Outcome) -> None:
    """Correct the run.json of a job that was killed before it could write that itself."""
    folder = RunFolder(cell.folder)
    is_unfinished = outcome.state in ("failed", "interrupted") and folder.run_json.is_file()
    if is_unfinished and folder.read_run()["state"] == "running":
        folder.update_run(state=outcome.state, error={"type": "Killed", "message": outcome.message})
