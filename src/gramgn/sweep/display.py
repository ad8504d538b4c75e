"""What a person sees of a sweep: one line per start and end, on a terminal a bar with the running jobs, and a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gramgn.app import OUTPUT_FILE, shown
from gramgn.errors import counted
from gramgn.progress import duration, say
from gramgn.records import RunFolder, count_states

REDRAW_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended in this command."""

    state: str  # that of its run, or `waiting`, or `rejected`
    message: str = ""  # why it failed, diverged, stopped or was rejected; a remark if it is done
    val_loss: float | None = None  # the best, if it is done
    seconds: float = 0.0  # that it worked in this command
    kept: bool = False  # it was finished before this command
    exit_code: int = 0  # 2 for bad input, as for a single run

    def words(self) -> str:
        """Return the reason, or the loss, in one line."""
        loss = "" if self.val_loss is None else f"best val loss {self.val_loss:.4g}"
        first = (self.message.strip().splitlines() or [""])[0][:300]
        return "; ".join(filter(None, (loss, first)))


class Display:
    """Shows the progress of a sweep on stderr."""

    def __init__(self) -> None:
        self._total = self._begun = self._ended = 0
        self._bar: tqdm[Any] | None = None
        self._drawn_at = 0.0

    def expect(self, jobs: int, ended: int) -> None:
        """Add jobs, of which some have ended already."""
        self._total += jobs
        self._begun += ended
        self._ended += ended

    def started(self, label: str) -> None:
        """Report that a job has started."""
        self._begun += 1
        if not sys.stderr.isatty():
            say(f"[{self._begun}/{self._total}] started  {label}")

    def requeued(self, label: str) -> None:
        """Report that a job that had started waits again."""
        self._begun -= 1
        say(f"requeued {label}: it saved its work and waits for its next start")

    def ended(self, label: str, folder: Path, outcome: Outcome) -> None:
        """Report how a job ended, at once, with the log of one that failed."""
        self._ended += 1
        if self._bar is not None:
            self._bar.n = self._ended
        log = f" (log: {shown(folder / OUTPUT_FILE)})" if outcome.state == "failed" else ""
        words = ", ".join(part for part in (duration(outcome.seconds), outcome.words()) if part)
        say(f"[{self._ended}/{self._total}] {outcome.state:<8} {label}  {words}{log}")

    def tick(self, running: Sequence[tuple[Path, str]]) -> None:
        """Redraw the bar, at most once per second, with folder and label of the running jobs; remove it after them."""
        if not running:
            if self._bar is not None:
                self._bar.close()
            self._bar = None
        elif sys.stderr.isatty() and time.monotonic() - self._drawn_at >= REDRAW_S:
            self._drawn_at = time.monotonic()
            if self._bar is None:
                self._bar = tqdm(
                    total=self._total, initial=self._ended, unit="job", dynamic_ncols=True, leave=False
                )
            self._bar.set_postfix_str("; ".join(f"{label}: {_progress(folder)}" for folder, label in running))


def _progress(folder: Path) -> str:
    """Return how far a running job is."""
    rows = RunFolder(folder).read_metrics()
    return f"epoch {rows[-1]['epoch']}, loss {rows[-1]['train_loss']:.3g}" if rows else "first epoch"


def closing_table(folder_name: str, rows: Sequence[tuple[str, Outcome]]) -> str:
    """Return the table of all jobs, from the label and outcome of each."""
    states = count_states(outcome.state for _, outcome in rows)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    lines = ["", f"{counted(len(rows), 'job')} in {folder_name}: {counts}"]
    width = min(60, max((len(label) for label, _ in rows), default=0))
    for label, outcome in rows:
        spent = "kept" if outcome.kept else duration(outcome.seconds) if outcome.seconds else ""
        lines.append(f"  {outcome.state:<11} {label:<{width}}  {spent:>11}  {outcome.words()}".rstrip())
    return "\n".join(lines)
