"""The jobs of a sweep as lists of overrides: a grid, points added to it, how a grid is extended, and what varies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override

from gramgn.app import check_doubled
from gramgn.errors import ConfigError, counted, is_whole
from gramgn.records import override_key

Command = tuple[str, ...]
SHOWN_VALUES = 12


class Settings(NamedTuple):
    """The settings of `conf/hydra/sweeper/`, checked."""

    params: Mapping[Any, Any]  # axes by key
    points: list[Command]  # lists of overrides
    extended_key: str  # the axis that is extended, e.g. `"optimizer.alpha"`; empty for none
    further_values: list[str]  # override texts, to be tried in turn


def read_settings(params: Any, points: Any, extend: Any, max_batch_size: Any) -> Settings:
    """Return the settings of the sweeper.

    Raises:
        ConfigError: One of them is not valid.
    """
    if not isinstance(params or {}, Mapping):
        raise ConfigError(f"hydra.sweeper.params={params!r} must map keys to values, e.g. {{seed: '0,1'}}")
    texts = points or []
    if isinstance(texts, str) or not all(isinstance(point, str) and point.strip() for point in texts):
        raise ConfigError(
            f"hydra.sweeper.points={points!r} must be a list of overrides, "
            "e.g. ['optimizer.lam=1 optimizer.alpha=0.1']"
        )
    key, values = (extend.get(name) if isinstance(extend, Mapping) else None for name in ("key", "values"))
    if extend and (
        not isinstance(key, str) or not isinstance(values, list) or not values or len(extend) != 2
    ):
        raise ConfigError(
            f"hydra.sweeper.extend={extend!r} must have a key and a list of values, "
            "e.g. {key: optimizer.alpha, values: [100, 300]}"
        )
    if max_batch_size is not None and not is_whole(max_batch_size, 1):
        raise ConfigError(f"hydra.sweeper.max_batch_size={max_batch_size!r} must be a number from 1, or null")
    for point in texts:
        check_doubled(point.split())
    further = [str(value) for value in values or []]
    return Settings(params or {}, [tuple(point.split()) for point in texts], key or "", further)


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
        values = list(override.sweep_string_iterator())
        if not values:
            raise ConfigError(
                f"{line} has no values, so that nothing would be run: glob() chooses among the names of files of a "
                "group in conf/, and range(start, stop, step) ends before stop"
            )
        same: dict[Any, list[str]] = {}
        for value in values:
            same.setdefault(_meant(value), []).append(value)
        if twice := [", ".join(dict.fromkeys(texts)) for texts in same.values() if len(texts) > 1]:
            raise ConfigError(f"{line} names {', '.join(twice)} more than once: name each value once")


def _meant(text: str) -> Any:
    """Return what the text of a value stands for, as far as two texts may stand for the same: 1, 1.0 and 1e0."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text.lower() if text.lower() in ("true", "false", "null") else text


def with_points(points: Sequence[Command], grid: Sequence[Command], given: Sequence[str]) -> list[Command]:
    """Return every point combined with every job of a grid; without points, the grid.

    Overrides of the command line, `given`, replace those of the points; of jobs that become equal one stays.
    """
    fixed = {override_key(each) for each in given}
    open_points = [tuple(each for each in point if override_key(each) not in fixed) for point in points]
    return list(dict.fromkeys((*point, *job) for point in open_points or [()] for job in grid))


def extended(
    jobs: Sequence[Command],
    key: str,
    further_values: Sequence[str],
    launch: Callable[[Sequence[Command]], Mapping[Command, str]],
) -> None:
    """Run a grid, and further values of the axis `key` where all its values diverged.

    For each combination of the other overrides without a finite job the next value is tried, until a job is finite or
    no value is left. A combination with a failed job is left alone: its outcome is not known. `launch` runs jobs and
    returns the state of each.
    """
    columns: dict[Command, list[str]] = {}
    for job, state in launch(jobs).items():
        rest = tuple(each for each in job if override_key(each) != key)
        columns.setdefault(rest, []).append(state)
    for value in further_values:
        open_columns = [rest for rest, states in columns.items() if set(states) == {"diverged"}]
        if not open_columns:
            return
        further = {(f"{key}={value}", *rest): rest for rest in open_columns}
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
    count = counted(num_jobs, "job")
    if not axes:
        return count
    listed = [
        f"{key} = {', '.join(values[:SHOWN_VALUES])}{', ...' if len(values) > SHOWN_VALUES else ''}"
        for key, values in axes.items()
    ]
    if num_jobs == math.prod(len(values) for values in axes.values()):
        return f"grid: {' x '.join(listed)}: {count}"
    return f"{count} over {'; '.join(listed)}"
