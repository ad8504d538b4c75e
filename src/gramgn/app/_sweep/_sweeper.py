"""The work of Hydra's sweeper plugin: from axes and points to jobs, in Hydra's own grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig, ListConfig, OmegaConf

from gramgn.app._sweep._axes import Command, chunks, extended, read_extension, read_points, with_points
from gramgn.app._sweep._grammar import grid, parse
from gramgn.app._sweep._launcher import OTHER_LAUNCHER, Jobs
from gramgn.errors import ConfigError
from gramgn.records import override_key


def run_sweep(
    context: HydraContext,
    launcher: Any,
    arguments: Sequence[str],
    params: Any,
    points: Any,
    extend: Any,
    max_batch_size: Any,
) -> list[JobReturn]:
    """Do all jobs of a sweep and return what the launcher says of each.

    Args:
        context: Hydra's.
        launcher: Runs jobs; one of ours.
        arguments: The command line.
        params: ``hydra.sweeper.params``; an axis that the command line names is the command line's.
        points: ``hydra.sweeper.points``.
        extend: ``hydra.sweeper.extend``; left out where the command line names its axis.
        max_batch_size: ``hydra.sweeper.max_batch_size``.

    Raises:
        ConfigError: If one of them cannot be used.
    """
    if not isinstance(getattr(launcher, "jobs", None), Jobs):
        raise ConfigError(OTHER_LAUNCHER)
    given = {override_key(argument) for argument in arguments}
    axes = {key: value for key, value in _mapping(params).items() if override_key(str(key)) not in given}
    commands = [*(f"{key}={value}" for key, value in axes.items()), *arguments]
    jobs = with_points(read_points(_plain(points)), grid(parse(context, commands)), arguments)
    extension = read_extension(_plain(extend))
    returns: list[JobReturn] = []

    def launch(commands: Sequence[Command]) -> Mapping[Command, str]:
        states: dict[Command, str] = {}
        for batch in chunks(commands, max_batch_size):
            found = launcher.launch([list(command) for command in batch], initial_job_idx=len(returns))
            returns.extend(found)
            states |= {command: launcher.jobs.state(job) for command, job in zip(batch, found, strict=True)}
        return states

    if extension is None or extension.key in given:
        launch(jobs)
    else:
        extended(jobs, extension, launch)
    return returns


def _mapping(params: Any) -> Mapping[Any, Any]:
    found = _plain(params) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"hydra.sweeper.params={found!r} must be a mapping of keys to values, e.g. {{seed: '0,1'}}"
        )
    return found


def _plain(value: Any) -> Any:
    return (
        OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
    )
