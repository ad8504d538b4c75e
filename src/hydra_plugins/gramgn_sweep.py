"""Hydra's plugins: a launcher that runs each job in a process of its own, and a sweeper with points beside the grid.

Hydra looks for plugins in the packages named ``hydra_plugins`` and imports them all at every start, ``--help``
included, so this file imports nothing heavy; the work is done in ``gramgn.app``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from gramgn.app._sweep._launcher import Jobs


class IsolatedLauncher(Launcher):
    """Runs each job in a fresh process; ``conf/hydra/launcher/`` has two settings of it.

    Args:
        n_jobs: Jobs at one time; -1: one a CPU core.
        threads_per_job: CPU threads of a job. None: torch's choice, or an equal share for several jobs at one time.
        gpus: CUDA devices to hand out, one a job. None: all visible ones, where several jobs run at one time.
    """

    def __init__(self, n_jobs: Any = 1, threads_per_job: Any = None, gpus: Any = None) -> None:
        super().__init__()
        self._options = (n_jobs, threads_per_job, gpus)
        self.jobs: Jobs | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra has; ``task_function`` is not called: jobs are plain data in other processes."""
        from gramgn.app._sweep._launcher import Jobs

        self.jobs = Jobs(hydra_context, config, *self._options)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Do jobs; see :meth:`gramgn.app._sweep._launcher.Jobs.launch`."""
        assert self.jobs is not None
        return self.jobs.launch(job_overrides, initial_job_idx)


class AxisSweeper(Sweeper):
    """A grid, points beside it, and more values of an axis where none of the grid's works.

    Args:
        params: Axes by key, as on a command line: ``{"seed": "0,1,2"}``. The command line replaces an axis.
        points: Overrides of single jobs, e.g. ``["optimizer.lam=1 optimizer.alpha=0.1"]``; each with all of the grid.
        extend: ``{"key": axis, "values": [...]}``: tried one after another where a whole column diverged.
        max_batch_size: Most jobs that are composed and checked at a time; None: all.
    """

    def __init__(
        self, params: Any = None, points: Any = None, extend: Any = None, max_batch_size: Any = None
    ) -> None:
        self._given = (params, points, extend, max_batch_size)
        self._context: HydraContext | None = None
        self._launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher that the configuration names."""
        from hydra.core.plugins import Plugins

        self._context = hydra_context
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        """Do all jobs that the configuration and the command line ask for."""
        from gramgn.app._sweep._sweeper import run_sweep

        assert self._context is not None
        assert self._launcher is not None
        return run_sweep(self._context, self._launcher, arguments, *self._given)
