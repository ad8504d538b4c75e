"""Hydra plugins: a launcher that runs each job in a fresh process, and a sweeper with more than a grid.

Hydra imports everything in the packages named `hydra_plugins` at every start, `--help` included, so this file imports
nothing heavy. `AxisSweeper` turns the command line into jobs, `IsolatedLauncher` composes their configurations, and
`gramgn.sweep.Sweep` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from gramgn.errors import ConfigError, JobFailedError

if TYPE_CHECKING:
    from gramgn.sweep import Cell, Options, Outcome, Resources, Sweep


class IsolatedLauncher(Launcher):
    """Runs each job in a fresh process; `conf/hydra/launcher/isolated.yaml` explains its settings."""

    def __init__(self, n_jobs: Any = 1, threads_per_job: Any = None, gpus: Any = None) -> None:
        self._options = (n_jobs, threads_per_job, gpus)
        self._sweep: Sweep | None = None

    def _read_options(self, on_failure: Any) -> Options | Resources:
        from gramgn.sweep import read_options

        return read_options(*self._options, on_failure)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra offers; `task_function` is not called, because jobs are data for other processes."""
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run jobs and return what Hydra's sweepers ask for.

        The value of a job that diverged is infinite: a search that only ever diverges ends like a grid that does.
        One that failed raises `JobFailedError` when its value is asked for.

        Raises:
            InputError: Nothing can be run; nothing was changed on disk.
            JobFailedError: A job failed, with `on_failure=stop`.
            StopRequested: A signal came.
        """
        setup_globals()
        sweep = self._begin()
        composed = [
            self._compose(sweep.folder.path, list(command), number)
            for number, command in enumerate(job_overrides, start=initial_job_idx)
        ]
        sweep.launch([cell for cell, _ in composed])
        if sweep.has_failed and sweep.options.on_failure == "stop":
            raise JobFailedError("a job failed and on_failure=stop: no further one was started")
        return [_job_return(cell, config, sweep.outcomes[cell.key]) for cell, config in composed]

    def state(self, job: JobReturn) -> str:
        """Return the state of a job that `launch` returned."""
        return self._begin().outcomes[Path(str(job.working_dir)).name].state

    def _begin(self) -> Sweep:
        if self._sweep is None:
            from gramgn.app import absolute, check_hydra_keys, check_place, register_sweep
            from gramgn.sweep import Sweep

            hydra = self._config.hydra
            check_hydra_keys(map(str, hydra.overrides.hydra), is_sweep=True)
            options = self._read_options(self._config.get("on_failure"))
            folder = absolute(str(hydra.sweep.dir))
            check_place(folder, self._config.get("name"))
            own = [str(word) for word in hydra.overrides.task]
            others = [word for word in hydra.overrides.hydra if not word.startswith("hydra.mode=")]
            mirrored = OmegaConf.select(self._config, "tracking.mode") != "none"
            self._common = {
                _text(each) for each in _parse(self._context, own) if not each.is_sweep_override()
            }
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            self._existing = {name.rpartition("-")[2]: name for name in names}
            self._sweep = Sweep(folder, [*own, *others], options, mirrored=mirrored)
            register_sweep(self._sweep)
        return self._sweep

    def _compose(self, sweep: Path, command: list[str], number: int) -> tuple[Cell, DictConfig]:
        from hydra.core.hydra_config import HydraConfig

        from gramgn.app import Job, choices_of, job_name, plain, run_entries
        from gramgn.sweep import Cell

        config = self._context.config_loader.load_sweep_config(self._config, command)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
            # Composed again, it would be named after this one job.
            config.hydra.sweep.dir = str(sweep)
        name = str(config.hydra.sweep.subdir) or job_name(command, self._common, self._existing)
        folder = sweep / name
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(config)
        hydra = config.hydra
        choices = choices_of(hydra)
        with open_dict(config):
            del config["hydra"]
        container = run_entries(plain(config))
        if container.get("resume") is not None:
            raise ConfigError(
                "resume= is for a single run. To resume a sweep, repeat its command with the same name="
            )
        environment = {str(key): str(value) for key, value in hydra.job.env_set.items()}
        job = Job(container, choices, command, folder, group=sweep.name)
        return Cell(job, environment), config


class SlurmLauncher(IsolatedLauncher):
    """Runs each job as a job of Slurm; `conf/hydra/launcher/slurm.yaml` explains its settings."""

    def __init__(self, **resources: Any) -> None:
        super().__init__()
        self._resources = {key: _plain(value) for key, value in resources.items()}

    def _read_options(self, on_failure: Any) -> Resources:
        from gramgn.sweep import read_resources

        return read_resources(self._resources, on_failure)


class AxisSweeper(BasicSweeper):
    """Hydra's grid, with points added to it and further values of an axis for which the whole grid diverged.

    `conf/hydra/sweeper/axes.yaml` explains its settings.
    """

    def __init__(
        self, max_batch_size: Any = None, params: Any = None, points: Any = None, extend: Any = None
    ) -> None:
        super().__init__(max_batch_size, params)
        self._given = (points, extend)

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        """Run all jobs that the configuration and the command line ask for.

        Raises:
            ConfigError: They cannot be turned into jobs.
        """
        from gramgn.app import OTHER_LAUNCHER
        from gramgn.records import override_key
        from gramgn.sweep import check_overrides, extended, read_settings, with_points

        if not isinstance(self.launcher, IsolatedLauncher):
            raise ConfigError(OTHER_LAUNCHER)
        launcher, context = self.launcher, self.hydra_context
        given = {override_key(argument) for argument in arguments}
        points, extend = map(_plain, self._given)
        settings = read_settings(_plain(self.params), points, extend, self.max_batch_size)
        axes = [
            f"{key}={value}" for key, value in settings.params.items() if override_key(str(key)) not in given
        ]
        overrides = _parse(context, [*axes, *arguments])
        check_overrides(overrides)
        (grid,) = self.split_arguments(overrides, None)
        # Hydra writes a deleted key ~key as ~key=, which deletes an empty value only.
        deleted = {f"{each.get_key_element()}=": _text(each) for each in overrides if each.is_delete()}
        returns: list[JobReturn] = []

        def launch(jobs: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
            states: dict[tuple[str, ...], str] = {}
            for batch in self.split_overrides_to_chunks([list(job) for job in jobs], self.max_batch_size):
                found = launcher.launch(batch, initial_job_idx=len(returns))
                returns.extend(found)
                states |= {tuple(job): launcher.state(each) for job, each in zip(batch, found, strict=True)}
            return states

        jobs = [tuple(deleted.get(each, each) for each in job) for job in grid]
        jobs = with_points(settings.points, jobs, arguments)
        key = settings.extended_key
        extended(jobs, key, settings.further_values if key and key not in given else [], launch)
        return returns


def _parse(context: HydraContext | None, overrides: list[str]) -> list[Override]:
    assert context is not None
    return OverridesParser.create(config_loader=context.config_loader).parse_overrides(overrides)


def _text(override: Override) -> str:
    """Return an override that is not swept in the form that a value of a sweep has, e.g. `lr=0.001` for `lr=1e-3`."""
    if override.is_delete():
        return str(override.input_line)
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def _plain(value: Any) -> Any:
    return (
        OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
    )


def _job_return(cell: Cell, config: DictConfig, outcome: Outcome) -> JobReturn:
    is_done = outcome.state in ("done", "diverged")
    failure = JobFailedError(f"{cell.key} {outcome.state}: {outcome.words()}")
    value = math.inf if outcome.state == "diverged" else outcome.val_loss
    return JobReturn(
        overrides=list(cell.job.overrides),
        cfg=config,
        working_dir=str(cell.folder),
        task_name="train",
        status=JobStatus.COMPLETED if is_done else JobStatus.FAILED,
        _return_value=value if is_done else failure,
    )
