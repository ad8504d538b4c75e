"""The parts of our step and a step of SGD, shape after shape and round after round: what grows how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gramgn.bench._breakdown import Breakdown, profile_step
from gramgn.bench._floor import Floor, count_floor
from gramgn.bench._measure import Settings
from gramgn.bench._memory import LR
from gramgn.bench._paths import PATHS
from gramgn.bench._problem import Problem, Shape, make_problem
from gramgn.bench._timing import WARM_UP, timed


@dataclass(frozen=True)
class Parts:
    """One shape in one round.

    Attributes:
        shape: Which.
        num_params: m.
        turn: The round, from 0.
        breakdown: Our step in channels last, split by torch's profiler.
        sgd_s: Seconds of a step of SGD with momentum in channels last.
        floor: Operation counts.
    """

    shape: Shape
    num_params: int
    turn: int
    breakdown: Breakdown
    sgd_s: float
    floor: Floor


def time_parts(shapes: Sequence[Shape], settings: Settings) -> Iterator[Parts]:
    """Time every shape once in each round, so that all see the same machine.

    Args:
        shapes: ResNets.
        settings: Device and number of rounds are read.
    """
    ready = [_prepare(make_problem(shape, settings.device)) for shape in shapes]
    for turn in range(settings.rounds):
        # From another shape in each round, as the paths of the benchmark take turns.
        for problem, ours, sgd, floor in ready[turn % len(ready) :] + ready[: turn % len(ready)]:
            breakdown = profile_step(ours, settings.device, num_steps=1)
            seconds = timed(sgd, settings.device)
            yield Parts(problem.shape, problem.num_params, turn, breakdown, seconds, floor)


def _prepare(problem: Problem) -> tuple[Problem, Callable[[], object], Callable[[], object], Floor]:
    ours, sgd = (PATHS[name].build(problem, LR, "").step for name in ("ours-cl", "sgd-cl"))
    for step in (ours, sgd):
        for _ in range(WARM_UP):
            step()
    return problem, ours, sgd, count_floor(problem.model, problem.x)
