"""Where the time of a run goes. Only `train` is the time axis of a curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = ("startup", "train", "eval", "checkpoint", "log")


class Clock:
    """Seconds spent in each part of a run, added up over its starts.

    `train` covers assembling the batches and the optimizer's steps, and nothing else: no evaluation, no
    checkpoint, no logging, no start-up. The device is synchronised at both edges of a part.

    Args:
        synchronize: Waits for the device.
        now: Reads a monotonic clock in seconds; tests pass their own.
    """

    def __init__(self, synchronize: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize = synchronize
        self._now = now
        self._start = now()
        self._wall_before = 0.0
        self._running: tuple[str, float] | None = None
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time spent inside as part `name`, also if it raises."""
        assert name in PARTS
        assert self._running is None, "parts do not nest"
        self._synchronize()
        self._running = (name, self._now())
        try:
            yield
        finally:
            self._synchronize()
            self.seconds[name] += self._now() - self._running[1]
            self._running = None

    def train_s(self) -> float:
        """Return the seconds of training so far, including the part in progress."""
        seconds = self.seconds["train"]
        if self._running is not None and self._running[0] == "train":
            seconds += self._now() - self._running[1]
        return seconds

    def wall_s(self) -> float:
        """Return the seconds since the run began; the time between its starts does not count."""
        return self._wall_before + self._now() - self._start

    def summary(self) -> dict[str, float]:
        """Return the seconds of every part and in total, for run.json and checkpoints."""
        return {f"{name}_s": value for name, value in self.seconds.items()} | {"wall_s": self.wall_s()}

    def resume(self, before: dict[str, float]) -> None:
        """Add the seconds of the earlier starts, the `summary` in their checkpoint, to those of this start so far."""
        for name in PARTS:
            self.seconds[name] += before[f"{name}_s"]
        self._wall_before = before["wall_s"]
