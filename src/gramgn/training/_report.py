"""What a person sees while a run goes on: a bar on a terminal, one plain line an epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from gramgn.progress import say as say_line
from gramgn.training._steps import StepReport

if TYPE_CHECKING:
    from gramgn.training._loop import Trainer

WARM_STEPS = 2
TIMED_STEPS = 3
LONG_S = 30 * 60


class Reporter:
    """Reports to stderr and to the run's log.

    Args:
        log: Also given every plain line, for the run's own log file.
        unit: The data's unit, for maes; may be set once it is known.
    """

    def __init__(self, log: Callable[[str], None], unit: str) -> None:
        self.unit = unit
        self._log = log
        self._bar: tqdm[Any] | None = None
        self._steps = 0
        self._timed_from = 0.0

    def say(self, message: str) -> None:
        """Write one plain line."""
        say_line(message)
        self._log(message)

    def begin(self, trainer: Trainer) -> None:
        """Open the bar where there is a terminal."""
        if sys.stderr.isatty():
            total = trainer.steps_per_epoch * trainer.config.epochs
            self._bar = tqdm(total=total, initial=trainer.position.step, unit="step", dynamic_ncols=True)

    def step(self, trainer: Trainer, report: StepReport) -> None:
        """Move the bar; after the first few steps say how long the whole run will take."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {trainer.position.epoch + 1}", refresh=False)
            self._bar.set_postfix_str(f"loss {report.loss:.3g}", refresh=False)
            self._bar.update()
        self._steps += 1
        if self._steps == WARM_STEPS:
            self._timed_from = time.perf_counter()
        elif self._steps == WARM_STEPS + TIMED_STEPS:
            self._estimate(trainer, (time.perf_counter() - self._timed_from) / TIMED_STEPS)

    def epoch(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        """Say how the epoch went."""
        parts = [
            f"epoch {row['epoch']}/{trainer.config.epochs}",
            f"{row['train_s']:.1f} s",
            f"train loss {row['train_loss']:.4g}",
        ]
        if row.get("val_loss") is not None:
            parts.append(f"val {row['val_loss']:.4g}")
            parts.append(f"test {row['test_loss']:.4g} (mae {row['test_mae']:.3g} {self.unit})")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _estimate(self, trainer: Trainer, step_s: float) -> None:
        config, data = trainer.config, trainer.data
        steps_left = trainer.steps_per_epoch * config.epochs - trainer.position.step
        # A forward pass takes about a third of a step, and val and test get one each evaluated epoch.
        evaluated = (data.size("val") + data.size("test")) / data.size("train") / 3 / config.eval_every
        seconds = step_s * steps_left * (1 + evaluated)
        self.say(f"{step_s:.2g} s a step: about {duration(seconds)} for the rest of this run")
        if seconds > LONG_S and data.device.type == "cpu" and config.scale == "paper":
            self.say("this is the paper's full size on a CPU; trainer=laptop is a small version of it")


def duration(seconds: float) -> str:
    """Return seconds as people say them, e.g. ``"2 h 05 min"``."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
