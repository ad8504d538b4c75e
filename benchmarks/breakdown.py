"""Where the time of our step goes: the ranges `gramgn.*` that the engine marks for torch's profiler.

Every moment belongs to the innermost range around it. On the CPU this splits the elapsed time; on CUDA it splits
the kernels' time by the place of their launch, autograd's thread included, and the rest of the step is the device
waiting for the host and kernels outside of all ranges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import synchronize

PREFIX = "gramgn."
PARTS = ("forward", "backward", "blocks", "gram", "solve", "update")
NUM_STEPS = 5


@dataclass(frozen=True)
class Interval:
    """A marked range, in seconds on the profiler's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step under the profiler.

    Attributes:
        step_s: The whole step.
        parts: Seconds by range, without the ranges inside it.
    """

    step_s: float
    parts: Mapping[str, float]

    @property
    def other_s(self) -> float:
        """The time that no range covers: the step less its parts."""
        return self.step_s - sum(self.parts.values())


def profile_step(step: Callable[[], object], device: torch.device, num_steps: int = NUM_STEPS) -> Breakdown:
    """Take `num_steps` steps under torch's profiler and return the mean step, split into its ranges."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize(device)
        step_s = (time.perf_counter() - start) / num_steps
    events = [event for event in profiler.events() or () if event.device_type.name == "CPU"]
    intervals = [
        Interval(event.name.removeprefix(PREFIX), event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in events
        if event.name.startswith(PREFIX)
    ]
    if device.type == "cuda":
        # A range may have an image of itself on the device, which is not a kernel.
        kernels = [
            (event.time_range.start * 1e-6, kernel.duration * 1e-6)
            for event in events
            if not event.name.startswith(PREFIX)
            for kernel in event.kernels
        ]
        totals = launched_within(kernels, intervals)
    else:
        totals = exclusive(intervals)
    return Breakdown(step_s, {name: seconds / num_steps for name, seconds in totals.items()})


def exclusive(intervals: Iterable[Interval]) -> dict[str, float]:
    """Return the seconds of each range less those of the ranges right inside it, by name."""
    totals = dict.fromkeys(PARTS, 0.0)
    around: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: (i.start, -i.end)):
        while around and around[-1].end <= interval.start:
            around.pop()
        length = interval.end - interval.start
        totals[interval.name] = totals.get(interval.name, 0.0) + length
        if around:
            totals[around[-1].name] -= length
        around.append(interval)
    return totals


def launched_within(
    kernels: Iterable[tuple[float, float]], intervals: Sequence[Interval]
) -> dict[str, float]:
    """Return kernel seconds by the innermost range of their launch.

    Args:
        kernels: (time of the launch, duration) in seconds.
        intervals: The ranges.
    """
    totals = dict.fromkeys(PARTS, 0.0)
    ordered = sorted(intervals, key=lambda i: (i.start, -i.end))
    around: list[Interval] = []
    place = 0
    for launch, duration in sorted(kernels):
        while place < len(ordered) and ordered[place].start <= launch:
            around.append(ordered[place])
            place += 1
        around = [interval for interval in around if interval.end >= launch]
        if around:
            # Sorted by start, longest first: the last one is the innermost.
            totals[around[-1].name] = totals.get(around[-1].name, 0.0) + duration
    return totals
