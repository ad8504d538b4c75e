"""Interleaved timing: in every round each path takes its turn, so that all see the same machine.

Not by `torch.utils.benchmark`: its `Timer` takes an untimed step before every measurement, which doubles the time of
slow steps, and its `Compare` prints neither ratios nor their spread.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Steps = Mapping[str, Callable[[], object]]
WARM_UP = 2
SHORTEST_S = 0.05
MOST_STEPS = 20


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and range of a sample."""

    median: float
    low: float
    high: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        quartiles = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(statistics.median(values), quartiles[0], quartiles[2], min(values), max(values))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock read now is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], device: torch.device, num_steps: int = 1) -> float:
    """Return the seconds of one step, the mean of `num_steps` in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / num_steps


def interleaved(
    steps: Steps, device: torch.device, rounds: int, limit_s: float = math.inf
) -> dict[str, list[float]]:
    """Return seconds of one step by path and round.

    The order within a round shifts by one place from round to round, and the garbage collector runs between
    steps, not in them. Short steps are repeated within a round to be long enough for the clock.

    Args:
        steps: The function that takes one step, by the path's name.
        device: The device on which the steps run.
        rounds: Number of rounds.
        limit_s: Time in seconds after which no round begins; at least two are done.
    """
    start = time.perf_counter()
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    in_a_row = {name: repeats(timed(step, device)) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    gc.collect()
    gc.freeze()  # a collection takes 0.1 s with all that torch has imported, and next to nothing without
    try:
        for turn in range(rounds):
            if turn >= 2 and time.perf_counter() - start > limit_s:
                break
            place = turn % len(names)
            for name in names[place:] + names[:place]:
                gc.collect()
                gc.disable()
                seconds[name].append(timed(steps[name], device, in_a_row[name]))
                gc.enable()
    finally:
        gc.enable()
        gc.unfreeze()
    return seconds


def repeats(step_s: float) -> int:
    """Return the number of steps in a row that is long enough for the clock."""
    return min(MOST_STEPS, max(1, math.ceil(SHORTEST_S / max(step_s, 1e-6))))


def ratios(seconds: Mapping[str, Sequence[float]], reference: str) -> dict[str, Spread]:
    """Return the ratio of each path to `reference`, by path.

    The median is the ratio of the medians; quartiles and range are those of the ratios of each round, whose two
    steps were taken next to each other.
    """
    base = statistics.median(seconds[reference])
    found = {}
    for name, values in seconds.items():
        paired = Spread.of([ours / sgd for ours, sgd in zip(values, seconds[reference], strict=True)])
        ratio = statistics.median(values) / base
        found[name] = Spread(ratio, paired.low, paired.high, paired.least, paired.most)
    return found
