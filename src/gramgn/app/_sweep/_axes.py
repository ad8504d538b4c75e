"""The jobs of a sweep as lists of overrides: a grid, points beside it, and how a grid is extended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramgn.errors import ConfigError
from gramgn.records import override_key

Command = tuple[str, ...]
SHOWN_VALUES = 12


@dataclass(frozen=True)
class Extension:
    """Where to go on when no value of an axis works.

    Attributes:
        key: The axis, e.g. ``"optimizer.alpha"``.
        values: Values to try one after another, each with its override text.
    """

    key: str
    values: tuple[str, ...]


def read_extension(given: Any) -> Extension | None:
    """Return ``hydra.sweeper.extend`` checked; None where it is not set.

    Raises:
        ConfigError: If it is not a mapping of ``key`` and ``values``.
    """
    if not given:
        return None
    key, values = (given.get(name) if isinstance(given, Mapping) else None for name in ("key", "values"))
    if not isinstance(key, str) or not isinstance(values, list) or not values or len(given) != 2:
        raise ConfigError(
            f"hydra.sweeper.extend={given!r} must have a key and a list of values, "
            "e.g. {key: optimizer.alpha, values: [100, 300]}"
        )
    return Extension(key, tuple(str(value) for value in values))


def read_points(given: Any) -> list[Command]:
    """Return ``hydra.sweeper.points`` as lists of overrides: each entry is a few of them with spaces between.

    Raises:
        ConfigError: If it is not a list of texts.
    """
    if not given:
        return []
    if isinstance(given, str) or not all(isinstance(point, str) and point.strip() for point in given):
        raise ConfigError(
            f"hydra.sweeper.points={given!r} must be a list of overrides, e.g. ['optimizer.lam=1 optimizer.alpha=0.1']"
        )
    return [tuple(point.split()) for point in given]


def with_points(points: Sequence[Command], grid: Sequence[Command], given: Sequence[str]) -> list[Command]:
    """Return every point with every job of a grid.

    Args:
        points: Lists of overrides; none: the grid alone.
        grid: Lists of overrides.
        given: Overrides of the command line: their keys are taken out of the points, and of equal jobs that are
            left by that one stays.
    """
    fixed = {override_key(each) for each in given}
    open_points = [tuple(each for each in point if override_key(each) not in fixed) for point in points]
    return list(dict.fromkeys((*point, *job) for point in open_points or [()] for job in grid))


def chunks(jobs: Sequence[Command], size: int | None) -> Iterator[Sequence[Command]]:
    """Yield the jobs in batches of at most ``size``; all at once for None.

    Raises:
        ConfigError: If the size is not at least 1.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(f"hydra.sweeper.max_batch_size={size!r} must be a number from 1, or null")
    for first in range(0, len(jobs), size or max(1, len(jobs))):
        yield jobs[first : first + (size or len(jobs))]


def extended(
    jobs: Sequence[Command],
    extension: Extension,
    launch: Callable[[Sequence[Command]], Mapping[Command, str]],
) -> None:
    """Run jobs, and go on with further values of an axis where each of its jobs diverged.

    For each combination of the other overrides without a job that ended finite the next value is tried, until one
    does or no value is left. A combination with a job that failed is left alone: what it would have done is not known.

    Args:
        jobs: The grid.
        extension: The axis and its further values.
        launch: Runs jobs and returns the state of each.
    """
    columns: dict[Command, list[str]] = {}
    for job, state in launch(jobs).items():
        columns.setdefault(_without(job, extension.key), []).append(state)
    for value in extension.values:
        open_columns = [rest for rest, states in columns.items() if set(states) == {"diverged"}]
        if not open_columns:
            return
        further = {(f"{extension.key}={value}", *rest): rest for rest in open_columns}
        for job, state in launch(list(further)).items():
            columns[further[job]].append(state)


def _without(job: Command, key: str) -> Command:
    return tuple(each for each in job if override_key(each) != key)


def axes_of(jobs: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return what varies over jobs: the values of each key that has several, or is not given to all of them."""
    values: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for job in jobs:
        for each in job:
            key, _, value = each.lstrip("+~").partition("=")
            counts[key] = counts.get(key, 0) + 1
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: found for key, found in values.items() if len(found) > 1 or counts[key] < len(jobs)}


def grid_text(axes: Mapping[str, Sequence[str]], num_jobs: int) -> str:
    """Return e.g. ``"grid: optimizer.lam = 1, 2 x seed = 0, 1: 4 jobs"``."""
    count = f"{num_jobs} job{'s' * (num_jobs != 1)}"
    if not axes:
        return count
    listed = []
    for key, values in axes.items():
        more = ", ..." if len(values) > SHOWN_VALUES else ""
        listed.append(f"{key} = {', '.join(values[:SHOWN_VALUES])}{more}")
    if num_jobs == math.prod(len(values) for values in axes.values()):
        return f"grid: {' x '.join(listed)}: {count}"
    return f"{count} over {'; '.join(listed)}"
