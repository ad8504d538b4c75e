"""How many jobs run at one time, and what of the machine each of them gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gramgn.errors import ConfigError

ON_FAILURE = ("continue", "stop")


@dataclass(frozen=True)
class Options:
    """The settings of ``conf/hydra/launcher`` and ``on_failure``.

    Attributes:
        n_jobs: Jobs at one time; -1: one a CPU core.
        threads_per_job: CPU threads of a job that sets no ``trainer.threads``. None: torch's choice for one job at
            a time, else an equal share of the cores.
        gpus: The CUDA devices to hand out, one a job. None: all visible ones where several jobs run at one time;
            a single one at a time chooses by ``trainer.device``.
        on_failure: ``"continue"`` with the other jobs, or ``"stop"``: begin no further one.
    """

    n_jobs: int = 1
    threads_per_job: int | None = None
    gpus: tuple[str, ...] | None = None
    on_failure: str = "continue"

    @property
    def num_at_once(self) -> int:
        """Jobs at one time."""
        return num_cores() if self.n_jobs == -1 else self.n_jobs

    @property
    def threads(self) -> int | None:
        """CPU threads of a job that does not say."""
        if self.threads_per_job is not None or self.num_at_once == 1:
            return self.threads_per_job
        share = max(1, num_cores() // self.num_at_once)
        # A smaller number that the environment asks for is kept.
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return min(share, int(asked)) if asked.isdigit() and int(asked) else share


def read_options(n_jobs: Any, threads_per_job: Any, gpus: Any, on_failure: Any) -> Options:
    """Return checked options.

    Raises:
        ConfigError: With the key, what it was and what it may be.
    """
    if not _whole(n_jobs) or (n_jobs != -1 and n_jobs < 1):
        raise ConfigError(
            f"hydra.launcher.n_jobs={n_jobs!r} must be a number of jobs from 1, or -1 for one a CPU core"
        )
    if threads_per_job is not None and (not _whole(threads_per_job) or threads_per_job < 1):
        raise ConfigError(
            f"hydra.launcher.threads_per_job={threads_per_job!r} must be a number of threads from 1, or null"
        )
    if on_failure not in ON_FAILURE:
        raise ConfigError(f"on_failure={on_failure!r} must be {' or '.join(ON_FAILURE)}")
    return Options(n_jobs, threads_per_job, _read_gpus(gpus), on_failure)


def _read_gpus(gpus: Any) -> tuple[str, ...] | None:
    if gpus is None:
        return None
    listed = gpus if isinstance(gpus, Sequence) and not isinstance(gpus, str) else [gpus]
    if not listed or not all(_whole(each) or isinstance(each, str) for each in listed):
        raise ConfigError(
            f"hydra.launcher.gpus={gpus!r} must be a list of CUDA devices, e.g. [0,1], or null for all visible ones"
        )
    return tuple(str(each) for each in listed)


def gpus_to_hand_out(options: Options, num_visible: int) -> tuple[str, ...]:
    """Return the values of ``CUDA_VISIBLE_DEVICES`` that jobs get in turn; none: jobs see what this process sees.

    Args:
        options: The launcher's settings.
        num_visible: CUDA devices that a process of ours sees.
    """
    if options.gpus is not None:
        return options.gpus
    if options.num_at_once == 1 or num_visible == 0:
        return ()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named[:num_visible]) or tuple(map(str, range(num_visible)))


def num_cores() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
