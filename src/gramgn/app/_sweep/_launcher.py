"""Between Hydra's plugins and a sweep: overrides to jobs, outcomes to what Hydra's sweepers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gramgn.app._folders import remember_sweep, safe_name
from gramgn.app._repository import absolute, shown
from gramgn.app._schema import TrackingConfig, plain, run_entries
from gramgn.app._sweep._display import Outcome
from gramgn.app._sweep._grammar import parse, text_of
from gramgn.app._sweep._options import read_options
from gramgn.app._sweep._review import FINISHED
from gramgn.app._sweep._session import Sweep
from gramgn.app._sweep._tasks import Cell, JobFailedError
from gramgn.errors import ConfigError
from gramgn.progress import say
from gramgn.stopping import deferred_signals

OTHER_LAUNCHER = (
    "this launcher would train all jobs of a sweep in one process, where one that fails takes the others with it. "
    "Choose hydra/launcher=isolated (one job at a time) or hydra/launcher=joblib (several)"
)


SWEEPS = "outputs/sweeps"
# Files in conf/ that follow from other choices, or from the machine.
DERIVED_GROUPS = ("dataset_optimizer", "scale", "local")
MANY = 100  # composing that many takes seconds


# Hydra makes the launcher and keeps it to itself: the entry point finds its sweep here, to report on it at the end.
_open: list[Sweep] = []


def has_run_jobs() -> bool:
    """Tell whether a sweep of this process has begun with its jobs."""
    return any(sweep.has_begun for sweep in _open)


def conclude_sweep(*, mirror: bool) -> int:
    """Print the table of the sweep that this process ran, if any, and return its exit code.

    Args:
        mirror: Send a summary to W&B, where its jobs have runs there.

    Raises:
        StopRequested: If a signal came meanwhile.
    """
    for sweep in _open:
        if sweep.outcomes:
            say(sweep.table())
        if mirror and sweep.has_begun:
            # Not at the top: only the end of a sweep draws its heatmap.
            from gramgn.app._sweep_summary import log_summary

            first = next(iter(sweep.cells.values()))
            log_summary(sweep.folder.path, TrackingConfig(**first.config["tracking"]))
    return max((sweep.exit_code for sweep in _open), default=0)


def close_sweep() -> None:
    """End whatever still runs of a sweep of this process, within a bounded time, and let go of its folder."""
    with deferred_signals():
        for sweep in _open:
            sweep.close()
    _open.clear()


class Jobs:
    """The work of Hydra's launcher plugin.

    Args:
        context: Hydra's, to compose the configuration of each job.
        config: The sweep's configuration.
        n_jobs: See :class:`~gramgn.app._sweep._options.Options`, as the following.
        threads_per_job: CPU threads of a job.
        gpus: CUDA devices to hand out.
    """

    def __init__(
        self, context: HydraContext, config: DictConfig, n_jobs: Any, threads_per_job: Any, gpus: Any
    ) -> None:
        self._context, self._config = context, config
        self._given = (n_jobs, threads_per_job, gpus)
        self._sweep: Sweep | None = None

    def launch(self, commands: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Do jobs and return what Hydra's sweepers want to know of each.

        A job that diverged has no value. One that failed raises :class:`JobFailedError` where its value is asked for.

        Raises:
            InputError: If nothing can be done; nothing was changed on disk then.
            JobFailedError: With ``on_failure=stop``.
            StopRequested: If a signal came.
        """
        setup_globals()
        sweep = self._begin()
        if len(commands) >= MANY:
            say(f"{len(commands)} jobs: composing the configuration of each")
        composed = [
            self._compose(sweep.folder.path, list(command), number)
            for number, command in enumerate(commands, start=first_number)
        ]
        sweep.launch([cell for cell, _ in composed])
        if sweep.has_failed and sweep.on_failure == "stop":
            raise JobFailedError("a job failed and on_failure=stop: no further one was begun")
        return [_job_return(cell, config, sweep.outcomes[cell.key]) for cell, config in composed]

    def state(self, job: JobReturn) -> str:
        """Return the state of a job that :meth:`launch` returned."""
        assert self._sweep is not None
        return self._sweep.outcomes[Path(str(job.working_dir)).name].state

    def _begin(self) -> Sweep:
        if self._sweep is None:
            hydra = self._config.hydra
            options = read_options(*self._given, self._config.get("on_failure"))
            folder = absolute(str(hydra.sweep.dir))
            check_place(folder, self._config.get("name"))
            others = [each for each in hydra.overrides.hydra if not each.startswith("hydra.mode=")]
            command = [*hydra.overrides.task, *others]
            mirrored = OmegaConf.select(self._config, "tracking.mode") != "none"
            given = parse(self._context, list(hydra.overrides.task))
            remember_sweep(folder, [text_of(each) for each in given if not each.is_sweep_override()])
            self._sweep = Sweep(folder, command, options, mirrored=mirrored)
            _open.append(self._sweep)
            self._sweep.warm_up()
        return self._sweep

    def _compose(self, sweep: Path, command: list[str], number: int) -> tuple[Cell, DictConfig]:
        config = self._context.config_loader.load_sweep_config(self._config, command)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
            # Asked for again, it would be named after this one job.
            config.hydra.sweep.dir = str(sweep)
        folder = sweep / str(config.hydra.sweep.subdir)
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(config)
        hydra = config.hydra
        with open_dict(config):
            del config["hydra"]
        container = run_entries(plain(config))
        if container.get("resume") is not None:
            raise ConfigError(
                "resume= is for a single run. A sweep goes on when its own command is repeated, with the same name="
            )
        environment = {str(key): str(value) for key, value in hydra.job.env_set.items()}
        cell = Cell(folder, tuple(command), container, choices_of(hydra), sweep.name, environment)
        return cell, config


def check_place(folder: Path, name: Any) -> None:
    """Refuse a sweep whose folder would be another's as well.

    Raises:
        ConfigError: If the name has what a folder's name cannot have, or the folder is the one that holds all sweeps.
    """
    taken = absolute(SWEEPS)
    safe = safe_name(name) if isinstance(name, str) else name
    if safe != name and folder == taken / safe:
        hint = f", e.g. name={safe}" if safe else ""
        raise ConfigError(
            f"name={name!r} cannot be a sweep's folder: take at most 60 letters of a-z and A-Z, digits and ._=,- "
            f"with none of ._- at its ends{hint}"
        )
    if folder == taken:
        raise ConfigError(f"{shown(folder)} holds all sweeps and cannot be one: give name=<its name>")


def choices_of(hydra: Any) -> dict[str, str]:
    """Return the option chosen in each group that a user chooses from; a group without one is absent."""
    chosen: Mapping[Any, Any] = hydra.runtime.choices
    return {
        str(group): str(option)
        for group, option in chosen.items()
        if option is not None and not str(group).startswith("hydra") and group not in DERIVED_GROUPS
    }


def _job_return(cell: Cell, config: DictConfig, outcome: Outcome) -> JobReturn:
    done = outcome.state in FINISHED
    failure = JobFailedError(f"{cell.key} {outcome.state}: {outcome.words()}")
    return JobReturn(
        overrides=list(cell.overrides),
        cfg=config,
        working_dir=str(cell.folder),
        task_name="train",
        status=JobStatus.COMPLETED if done else JobStatus.FAILED,
        _return_value=outcome.val_loss if done else failure,
    )
