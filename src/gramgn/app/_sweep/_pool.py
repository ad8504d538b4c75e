"""The child processes of a sweep: at most so many at one time, each with its share of the machine."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gramgn.app._repository import repository
from gramgn.app._sweep._client import ForkServer, ServerGoneError
from gramgn.app._sweep._display import Display, Outcome, Running
from gramgn.app._sweep._options import Options, gpus_to_hand_out
from gramgn.app._sweep._server import GRACE_S
from gramgn.app._sweep._tasks import OUTPUT_FILE, Ended, JobFailedError, Planned, Task
from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import RunFolder, is_locked
from gramgn.stopping import StopAtOnce, StopFlag, deferred_signals

TICK_S = 0.1
KILL_WAIT_S = 5.0
OUT_OF_MEMORY = "killed by SIGKILL (out of memory?)"


class Pool:
    """Runs checks and jobs in children of a fork server, which is started when it is first needed.

    Args:
        options: How many at one time, and with what.
        modules: What the server imports.
        git: The state of the code.
    """

    def __init__(self, options: Options, modules: Sequence[str], git: dict[str, Any]) -> None:
        self._options, self._modules, self._git = options, modules, git
        self._server: ForkServer | None = None
        self._lock: int | None = None
        self._gpus: tuple[str, ...] = options.gpus or ()
        self._running: dict[int, tuple[Planned, Running]] = {}
        self._lost: list[tuple[Planned, Running, Outcome]] = []

    def warm_up(self) -> ForkServer:
        """Start the server, if it does not run, and return it."""
        if self._server is None:
            threads = self._options.threads
            self._server = ForkServer(self._modules, {"OMP_NUM_THREADS": str(threads)} if threads else {})
            if self._lock is not None:
                self._server.hold(self._lock)
        return self._server

    def hold(self, lock: int) -> None:
        """Let the server hold the sweep's lock as well, until its last child has ended."""
        self._lock = lock
        if self._server is not None:
            self._server.hold(lock)

    def close(self, *, at_once: bool = False) -> None:
        """End the server and whatever still runs.

        Args:
            at_once: Nothing that runs has work to save.
        """
        server, self._server = self._server, None
        if server is not None:
            server.close(at_once=at_once)

    def check(self, plans: Sequence[Planned]) -> list[str | None] | None:
        """Return what is wrong with each job, as far as that can be told without its data.

        Returns:
            A message or None for each; None instead of a list where the checking process was killed: then each job
            finds out for itself.

        Raises:
            InputError: If the jobs cannot be checked at all.
            JobFailedError: If the process that they are forked from was killed.
            StopRequested: If a signal came.
        """
        jobs = tuple((plan.cell, plan.action) for plan in plans)
        task = Task("check", jobs, repository(), None, {}, self._options.threads, self._git)
        with deferred_signals() as stop:
            try:
                number = self.warm_up().start(task)
                ended = self._await(number, stop)
            except ServerGoneError:
                raise JobFailedError(
                    "the process that the jobs are forked from has ended. If it said nothing above, it was killed, "
                    "perhaps because the memory is full; the same command begins again"
                ) from None
        if ended.result is None:
            return None
        if ended.result["state"] != "done":
            raise InputError(ended.result["message"])
        self._gpus = gpus_to_hand_out(self._options, ended.result["num_gpus"])
        if 0 < len(self._gpus) < self._options.num_at_once:
            say(f"note: {self._options.num_at_once} jobs at a time share {len(self._gpus)} CUDA devices")
        faults: list[str | None] = ended.result["faults"]
        return [fault or self._misplaced(plan) for fault, plan in zip(faults, plans, strict=True)]

    def _await(self, number: int, stop: StopFlag) -> Ended:
        while True:
            for ended in self.warm_up().wait(TICK_S):
                if ended.number == number:
                    return ended
            if stop.signum is not None:
                self.close(at_once=True)
                stop.raise_if_set()

    def _misplaced(self, plan: Planned) -> str | None:
        device = plan.cell.config["trainer"]["device"]
        if not self._gpus or not str(device).startswith("cuda:"):
            return None
        return (
            f"trainer.device={device} names a device, while the launcher hands out one to each job. "
            "Give trainer.device=cuda, or hydra.launcher.gpus and n_jobs=1"
        )

    def run(
        self,
        plans: Sequence[Planned],
        labels: Sequence[str],
        display: Display,
        began: Callable[[Planned], None],
        ended: Callable[[Planned, Outcome], None],
    ) -> None:
        """Run jobs until all have ended, or one failed and ``on_failure`` is ``stop``.

        Args:
            plans: The jobs.
            labels: What distinguishes each.
            display: Is told of starts and ends.
            began: Called before a job starts.
            ended: Called when it has ended.

        Raises:
            StopRequested: If a signal came; the children have ended by then.
        """
        waiting = deque(zip(plans, labels, strict=True))
        slots = list(range(self._options.num_at_once))
        with deferred_signals() as stop:
            try:
                while waiting or self._running or self._lost:
                    while waiting and slots and stop.signum is None:
                        self._start(*waiting.popleft(), slots.pop(0), display, began)
                    if stop.signum is not None:
                        break
                    for plan, job, outcome in self._wait(TICK_S, stopping=False):
                        slots = sorted([*slots, job.slot])
                        display.ended(job, outcome)
                        ended(plan, outcome)
                        if outcome.state == "failed" and self._options.on_failure == "stop":
                            waiting.clear()
                    display.tick([job for _, job in self._running.values()])
                if stop.signum is not None:
                    if self._running:
                        display.say(f"stopping {len(self._running)} running, at most {GRACE_S:.0f} s")
                    self._end(stop.signum, GRACE_S, display, ended)
            except StopAtOnce as again:
                self._end(signal.SIGKILL, KILL_WAIT_S, display, ended)
                raise again from None
            finally:
                display.clear()
            stop.raise_if_set()

    def _start(
        self, plan: Planned, label: str, slot: int, display: Display, began: Callable[[Planned], None]
    ) -> None:
        cell = plan.cell
        environment = dict(cell.environment)
        if self._gpus and not str(cell.config["trainer"]["device"]).startswith("cpu"):
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        task = Task(
            "run",
            ((cell, plan.action),),
            repository(),
            cell.folder / OUTPUT_FILE,
            environment,
            self._options.threads,
            self._git,
        )
        began(plan)
        job = Running(cell, label, slot)
        try:
            number = self.warm_up().start(task)
        except ServerGoneError:
            self._replace_server()
            number = self.warm_up().start(task)
        self._running[number] = (plan, job)
        display.started(job)

    def _wait(self, timeout_s: float, *, stopping: bool) -> list[tuple[Planned, Running, Outcome]]:
        """Return the jobs that ended meanwhile, with how."""
        found, self._lost = self._lost, []
        try:
            for ended in self.warm_up().wait(0 if found else timeout_s):
                plan, job = self._running.pop(ended.number)
                found.append((plan, job, outcome_of(job, ended, stopping=stopping)))
        except ServerGoneError:
            self._replace_server()
        return found

    def _replace_server(self) -> None:
        """Wait for the children of a server that was killed, which stop by themselves, and count them as lost."""
        self.close()
        lost, self._running = list(self._running.values()), {}
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(is_locked(job.cell.folder / ".lock") for _, job in lost):
            time.sleep(TICK_S)
        message = "stopped because the process it was forked from was killed; the same command goes on"
        for plan, job in lost:
            ended = Ended(0, {"state": "failed", "exit_code": 1, "message": message, "val_loss": None}, 1)
            self._lost.append((plan, job, outcome_of(job, ended, stopping=False)))

    def _end(
        self, signum: int, patience_s: float, display: Display, ended: Callable[[Planned, Outcome], None]
    ) -> None:
        """Send a signal to all children and wait for them; kill those that take too long."""
        for order, seconds in ((signum, patience_s), (signal.SIGKILL, KILL_WAIT_S)):
            if not self._running:
                return
            try:
                self.warm_up().signal(order)
            except ServerGoneError:
                self._replace_server()
            end = time.monotonic() + seconds
            while self._lost or (self._running and time.monotonic() < end):
                for plan, job, outcome in self._wait(TICK_S, stopping=True):
                    display.ended(job, outcome)
                    ended(plan, outcome)


def outcome_of(job: Running, ended: Ended, *, stopping: bool) -> Outcome:
    """Return how a job ended, and mend its run.json where it was killed before it could write that itself."""
    seconds = time.monotonic() - job.since
    if ended.result is not None:
        result = ended.result
        outcome = Outcome(
            result["state"], result["message"], result["val_loss"], seconds, exit_code=result["exit_code"]
        )
    elif stopping:
        outcome = Outcome("interrupted", _how(ended.status), seconds=seconds, exit_code=130)
    else:
        outcome = Outcome("failed", _how(ended.status), seconds=seconds, exit_code=1)
    folder = RunFolder(job.cell.folder)
    if outcome.state in ("failed", "interrupted") and folder.run_json.is_file():
        record = folder.read_run()
        if record["state"] == "running":
            folder.update_run(state=outcome.state, error={"type": "Killed", "message": outcome.message})
    return outcome


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return OUT_OF_MEMORY
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended without a word, with exit code {status}"
