"""The progress of a run for a person: a bar on a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from gramgn.progress import say as say_line

WARM_STEPS = 2
TIMED_STEPS = 3
LONG_S = 30 * 60


@dataclass(frozen=True)
class Schedule:
    """The size of a whole run.

    Attributes:
        epochs: Number of epochs in total.
        total_steps: Number of steps in total.
        done_steps: Number of steps done before this start.
        eval_share: Time of the evaluations relative to the time of the steps, roughly.
        is_large: Whether this is the paper's full size on a CPU, for which there is a smaller version.
    """

    epochs: int
    total_steps: int
    done_steps: int
    eval_share: float
    is_large: bool


class Reporter:
    """Reports to stderr and to the run's log.

    Args:
        log: Called with every plain line, for the run's own log file.
        unit: The data's unit, for mean absolute errors; may be set once it is known.
    """

    def __init__(self, log: Callable[[str], None], unit: str) -> None:
        self.unit = unit
        self._log = log
        self._bar: tqdm[Any] | None = None
        self._schedule = Schedule(0, 0, 0, 0.0, False)
        self._steps = 0
        self._timed_from = 0.0

    def say(self, message: str) -> None:
        """Write one plain line."""
        say_line(message)
        self._log(message)

    def begin(self, schedule: Schedule) -> None:
        """Start reporting a run; on a terminal, open the bar."""
        self._schedule = schedule
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=schedule.total_steps, initial=schedule.done_steps, unit="step", dynamic_ncols=True
            )

    def step(self, epoch: int, loss: float) -> None:
        """Advance the bar; after the first few steps, estimate the time of the whole run."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {epoch}", refresh=False)
            self._bar.set_postfix_str(f"loss {loss:.3g}", refresh=False)
            self._bar.update()
        self._steps += 1
        if self._steps == WARM_STEPS:
            self._timed_from = time.perf_counter()
        elif self._steps == WARM_STEPS + TIMED_STEPS:
            self._estimate((time.perf_counter() - self._timed_from) / TIMED_STEPS)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Report the errors of an epoch."""
        parts = [
            f"epoch {row['epoch']}/{self._schedule.epochs}",
            f"{row['train_s']:.1f} s",
            f"train loss {row['train_loss']:.4g}",
        ]
        if row.get("val_loss") is not None:
            parts.append(f"val {row['val_loss']:.4g}")
            parts.append(f"test {row['test_loss']:.4g} (mae {row['test_mae']:.3g} {self.unit})")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _estimate(self, step_s: float) -> None:
        schedule = self._schedule
        steps_left = schedule.total_steps - schedule.done_steps - self._steps
        seconds = step_s * steps_left * (1 + schedule.eval_share)
        self.say(f"{step_s:.2g} s per step: about {duration(seconds)} for the rest of this run")
        if seconds > LONG_S and schedule.is_large:
            self.say("this is the paper's full size on a CPU; trainer=laptop is a small version of it")


def duration(seconds: float) -> str:
    """Return a duration in words, such as `"2 h 05 min"`."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
