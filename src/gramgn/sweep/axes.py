"""The jobs of a sweep as lists of overrides: a grid, points beside it, how a grid is extended, and what varies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Glob, Override, RangeSweep

from gramgn.app import check_doubled
from gramgn.errors import ConfigError, is_whole
from gramgn.records import override_key

Command = tuple[str, ...]
SHOWN_VALUES = 12


@dataclass(frozen=True)
class Extension:
    """Further values of an axis.

    Attributes:
        key: The axis, e.g. `"optimizer.alpha"`.
        values: Override texts of the values, to be tried in turn.
    """

    key: str
    values: tuple[str, ...]


def read_extension(given: Any) -> Extension | None:
    """Return `hydra.sweeper.extend` checked; None if it is not set.

    Raises:
        ConfigError: It is not a mapping of `key` and `values`.
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
    """Return `hydra.sweeper.points` as lists of overrides; each entry holds a few of them, separated by spaces.

    Raises:
        ConfigError: It is not a list of texts.
    """
    if not given:
        return []
    if isinstance(given, str) or not all(isinstance(point, str) and point.strip() for point in given):
        raise ConfigError(
            f"hydra.sweeper.points={given!r} must be a list of overrides, e.g. ['optimizer.lam=1 optimizer.alpha=0.1']"
        )
    return [tuple(point.split()) for point in given]


def check_params(given: Any) -> Mapping[Any, Any]:
    """Return `hydra.sweeper.params` checked.

    Raises:
        ConfigError: It is not a mapping.
    """
    if not isinstance(given or {}, Mapping):
        raise ConfigError(f"hydra.sweeper.params={given!r} must map keys to values, e.g. {{seed: '0,1'}}")
    return given or {}


def check_batch_size(size: Any) -> None:
    """Check `hydra.sweeper.max_batch_size`.

    Raises:
        ConfigError: It is neither a whole number from 1 nor None.
    """
    if size is not None and not is_whole(size, 1):
        raise ConfigError(f"hydra.sweeper.max_batch_size={size!r} must be a number from 1, or null")


def check_overrides(overrides: Sequence[Override]) -> None:
    """Check what the command line varies.

    Raises:
        ConfigError: A key is given twice, or an axis has no values, a value twice, or only a range of real numbers.
    """
    check_doubled(str(override.input_line) for override in overrides)
    for override in overrides:
        if not override.is_sweep_override():
            continue
        line, key = str(override.input_line), override.get_key_element()
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{line} names no values: give some, e.g. {key}=0.1,1,10, or search with sweep=optuna_alpha"
            )
        values = Counter(override.sweep_string_iterator())
        if not values:
            raise ConfigError(f"{line} has no values, so that nothing would be run{_why(override)}")
        if twice := [value for value, count in values.items() if count > 1]:
            raise ConfigError(f"{line} names {', '.join(twice)} more than once: name each value once")


def _why(override: Override) -> str:
    value: object = override.value()
    if isinstance(value, Glob):
        return ": glob() chooses among the files of a group in conf/, such as optimizer, by their names"
    if isinstance(value, RangeSweep):
        return ": range(start, stop, step) ends before stop"
    return ""


def with_points(points: Sequence[Command], grid: Sequence[Command], given: Sequence[str]) -> list[Command]:
    """Return every point combined with every job of a grid.

    Args:
        points: Lists of overrides; without any the result is the grid.
        grid: Lists of overrides.
        given: Overrides of the command line. Their keys are removed from the points; of jobs that become equal one
            stays.
    """
    fixed = {override_key(each) for each in given}
    open_points = [tuple(each for each in point if override_key(each) not in fixed) for point in points]
    return list(dict.fromkeys((*point, *job) for point in open_points or [()] for job in grid))


def extended(
    jobs: Sequence[Command],
    extension: Extension,
    launch: Callable[[Sequence[Command]], Mapping[Command, str]],
) -> None:
    """Run jobs, and further values of an axis where each of its jobs diverged.

    For each combination of the other overrides without a finite job the next value is tried, until a job is finite or
    no value is left. A combination with a failed job is left alone: its outcome is not known.

    Args:
        jobs: The grid.
        extension: The axis and its further values.
        launch: Runs jobs and returns the state of each.
    """
    columns: dict[Command, list[str]] = {}
    for job, state in launch(jobs).items():
        rest = tuple(each for each in job if override_key(each) != extension.key)
        columns.setdefault(rest, []).append(state)
    for value in extension.values:
        open_columns = [rest for rest, states in columns.items() if set(states) == {"diverged"}]
        if not open_columns:
            return
        further = {(f"{extension.key}={value}", *rest): rest for rest in open_columns}
        for job, state in launch(list(further)).items():
            columns[further[job]].append(state)


def axes_of(jobs: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return what varies over jobs: the values of each key that has several, or that not all of them have."""
    values: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for job in jobs:
        for each in job:
            key, _, value = each.lstrip("+~").partition("=")
            counts[key] += 1
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: found for key, found in values.items() if len(found) > 1 or counts[key] < len(jobs)}


def grid_text(axes: Mapping[str, Sequence[str]], num_jobs: int) -> str:
    """Return e.g. `"grid: optimizer.lam = 1, 2 x seed = 0, 1: 4 jobs"`."""
    count = f"{num_jobs} job{'s' * (num_jobs != 1)}"
    if not axes:
        return count
    listed = [
        f"{key} = {', '.join(values[:SHOWN_VALUES])}{', ...' if len(values) > SHOWN_VALUES else ''}"
        for key, values in axes.items()
    ]
    if num_jobs == math.prod(len(values) for values in axes.values()):
        return f"grid: {' x '.join(listed)}: {count}"
    return f"{count} over {'; '.join(listed)}"
