"""The progress of a run for a person: a bar on a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

from gramgn.errors import counted
from gramgn.progress import duration
from gramgn.progress import say as say_line

WARM_STEPS = 2
TIMED_STEPS = 3
LONG_S = 30 * 60


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
        self._epochs = 0
        self._steps = 0
        self._weight = 0.0
        self._is_large = False
        self._timed_from = 0.0

    def say(self, message: str) -> None:
        """Write one plain line."""
        say_line(message)
        self._log(message)

    def begin(
        self, epochs: int, *, total_steps: int, done_steps: int, eval_share: float, is_large: bool
    ) -> None:
        """Start reporting a run; on a terminal, open the bar.

        Args:
            epochs: Number of epochs in total.
            total_steps: Number of steps in total.
            done_steps: Number of steps done before this start.
            eval_share: Time of the evaluations relative to the time of the steps, roughly.
            is_large: Whether this is the paper's full size on a CPU, for which there is a smaller version.
        """
        self._epochs, self._is_large = epochs, is_large
        self._weight = (total_steps - done_steps - WARM_STEPS - TIMED_STEPS) * (1 + eval_share)
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=done_steps, unit="step", dynamic_ncols=True)

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
            step_s = (time.perf_counter() - self._timed_from) / TIMED_STEPS
            seconds = step_s * self._weight
            self.say(f"{step_s:.2g} s per step: about {duration(seconds)} for the rest of this run")
            if seconds > LONG_S and self._is_large:
                self.say("this is the paper's full size on a CPU; trainer=laptop is a small version of it")

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Report the errors of an epoch."""
        parts = [
            f"epoch {row['epoch']}/{self._epochs}",
            f"{row['train_s']:.1f} s",
            f"train loss {row['train_loss']:.4g}",
        ]
        if row.get("given_up"):
            parts.append(f"{counted(row['given_up'], 'step')} given up")
        if row.get("val_loss") is not None:
            parts.append(f"val {row['val_loss']:.4g}")
            parts.append(f"test {row['test_loss']:.4g} (mae {row['test_mae']:.3g} {self.unit})")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
