"""What a person sees of a sweep: a table that is redrawn on a terminal, a line a start and an end elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gramgn.app._repository import shown
from gramgn.app._sweep._tasks import OUTPUT_FILE, Cell
from gramgn.errors import InputError
from gramgn.records import CellStatus, RunFolder, run_status

REDRAW_S = 1.0
LONGEST_REASON = 300


@dataclass(frozen=True)
class Outcome:
    """How a job stands at the end of a command, as text and numbers.

    Attributes:
        state: That of its run, or ``waiting``, or ``refused``.
        message: Why it failed, diverged, stopped or was refused.
        val_loss: Its best validation loss, if it is done.
        seconds: How long it worked in this command.
        kept: Whether it was finished before this command.
        exit_code: 2 for bad input, as for a single run.
    """

    state: str
    message: str = ""
    val_loss: float | None = None
    seconds: float = 0.0
    kept: bool = False
    exit_code: int = 0

    def words(self) -> str:
        """Return the reason, or the loss, in one line."""
        if self.state == "done":
            return "" if self.val_loss is None else f"best val loss {self.val_loss:.4g}"
        lines = self.message.strip().splitlines()
        return lines[0][:LONGEST_REASON] if lines else ""


@dataclass(frozen=True)
class Running:
    """A job that a child process works on.

    Attributes:
        cell: The job.
        label: What distinguishes it.
        slot: Which of the places for jobs at one time it has.
        since: When it began, by the monotonic clock.
    """

    cell: Cell
    label: str
    slot: int
    since: float = field(default_factory=time.monotonic)


class Display:
    """Says how a sweep goes, on stderr.

    Args:
        num_at_once: Jobs that run at one time, for the estimate of what is left.
    """

    def __init__(self, num_at_once: int) -> None:
        self._at_once = num_at_once
        self._start = time.monotonic()
        self._states: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = 0
        self._drawn_at = 0.0

    def expect(self, states: Mapping[str, int], kept_seconds: Sequence[float]) -> None:
        """Take note of jobs: how many there are in each state, and what finished ones took."""
        self._states.update(states)
        self._seconds += kept_seconds

    def say(self, line: str) -> None:
        """Write a line that stays, above the table."""
        self._write(f"{self._erase()}{line}\n")

    def started(self, job: Running) -> None:
        """Tell that a job began."""
        self._states.update({"waiting": -1, "running": 1})
        if not self._live:
            self.say(f"[{self._begun}/{self._total}] started  {job.label}")

    def ended(self, job: Running, outcome: Outcome) -> None:
        """Tell how a job ended; the reason of one that failed, with its log, at once."""
        self._states.update({"running": -1, outcome.state: 1})
        if outcome.state in ("done", "diverged"):
            self._seconds.append(outcome.seconds)
        log = f" (log: {shown(job.cell.folder / OUTPUT_FILE)})" if outcome.state == "failed" else ""
        left = "" if self._live else self._left([], [])
        words = ", ".join(part for part in (duration(outcome.seconds), outcome.words()) if part)
        self.say(
            f"[{self._ended}/{self._total}] {outcome.state:<8} {job.label}  {words}{log}"
            f"{'; about ' + left + ' left' if left else ''}"
        )

    def tick(self, running: Sequence[Running], *, now: bool = False) -> None:
        """Redraw the table, at most once a second; does nothing where output is not a terminal."""
        if not self._live or (not now and time.monotonic() - self._drawn_at < REDRAW_S):
            return
        self._drawn_at = time.monotonic()
        width, height = shutil.get_terminal_size()
        shown_jobs = running[: max(1, height - 4)]
        found = [_status(job.cell) for job in shown_jobs]
        rows = [_row(job, status) for job, status in zip(shown_jobs, found, strict=True)]
        lines = [self._summary(running, _expected_seconds(shown_jobs, found)), *rows]
        lines = [line[: width - 1] for line in lines]
        self._write(self._erase() + "".join(f"{line}\n" for line in lines))
        self._drawn = len(lines)

    def clear(self) -> None:
        """Take the table away."""
        self._write(self._erase())

    @property
    def _total(self) -> int:
        return sum(self._states.values())

    @property
    def _begun(self) -> int:
        return self._total - self._states["waiting"]

    @property
    def _ended(self) -> int:
        return self._begun - self._states["running"]

    def _summary(self, running: Sequence[Running], expected: Sequence[float]) -> str:
        counts = count_words(self._states)
        left = self._left(running, expected)
        spent = duration(time.monotonic() - self._start)
        return f"{self._total} jobs: {counts} | {spent}" + (f", about {left} left" if left else "")

    def _left(self, running: Sequence[Running], expected: Sequence[float]) -> str:
        """Return how long the rest may take, from what finished jobs took, or what running ones are expected to."""
        known = self._seconds or expected
        if not known:
            return ""
        mean = sum(known) / len(known)
        spent = sum(min(mean, time.monotonic() - job.since) for job in running)
        work = mean * (self._states["waiting"] + self._states["running"]) - spent
        return duration(work / self._at_once) if work > 0 else ""

    def _erase(self) -> str:
        drawn, self._drawn = self._drawn, 0
        return f"\x1b[{drawn}F\x1b[J" if drawn else ""

    @staticmethod
    def _write(text: str) -> None:
        # Where nobody reads stderr any more the work goes on: what matters is on disk.
        with suppress(BrokenPipeError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _status(cell: Cell) -> CellStatus | None:
    """Return how far a running job is; None before its run has begun."""
    folder = RunFolder(cell.folder)
    if not folder.run_json.is_file():
        return None
    try:
        return run_status(folder, active=True, folder=cell.folder, label="", overrides=())
    except InputError:  # a file that is being replaced on some network file systems; the next look finds it
        return None


def _row(job: Running, status: CellStatus | None) -> str:
    spent = duration(time.monotonic() - job.since)
    if status is None:
        progress = "starting"
    elif status.epoch is None or status.train_loss is None:
        progress = "first epoch"
    else:
        progress = f"epoch {status.epoch}/{status.epochs}, loss {status.train_loss:.3g}"
    return f"  {spent:>7}  {progress:<28} {job.label}"


def _expected_seconds(jobs: Sequence[Running], found: Sequence[CellStatus | None]) -> list[float]:
    """Return what running jobs will have taken at their present pace, of those with a whole epoch."""
    now = time.monotonic()
    return [
        (now - job.since) * status.epochs / status.epoch
        for job, status in zip(jobs, found, strict=True)
        if status is not None and status.epoch and status.epochs
    ]


def count_words(states: Mapping[str, int]) -> str:
    """Return e.g. ``"3 done, 1 failed"``."""
    order = ("done", "diverged", "failed", "refused", "interrupted", "running", "waiting")
    return ", ".join(f"{states[state]} {state}" for state in order if states.get(state))


def duration(seconds: float) -> str:
    """Return a duration to read, e.g. ``"3.2 s"`` or ``"1:05:00"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def closing_table(folder_name: str, rows: Sequence[tuple[str, Outcome]]) -> str:
    """Return the table of all jobs.

    Args:
        folder_name: The sweep's folder, for the title.
        rows: Label and outcome of every job.
    """
    states = Counter(outcome.state for _, outcome in rows)
    title = f"{len(rows)} job{'s' * (len(rows) != 1)} in {folder_name}: {count_words(states)}"
    width = max((len(label) for label, _ in rows), default=0)
    lines = [
        f"  {outcome.state:<11} {label:<{min(width, 60)}}  {_spent(outcome):>8}  {outcome.words()}".rstrip()
        for label, outcome in rows
    ]
    return "\n".join(["", title, *lines])


def _spent(outcome: Outcome) -> str:
    if outcome.kept:
        return "kept"
    return duration(outcome.seconds) if outcome.seconds else ""
