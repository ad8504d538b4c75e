"""How many jobs run at a time, and the share of the machine that each of them gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gramgn.errors import ConfigError, checked_choice, is_whole


@dataclass(frozen=True)
class Options:
    """The settings of `conf/hydra/launcher/isolated.yaml`, and `on_failure`."""

    n_jobs: int = 1  # number of jobs at a time; -1 stands for one per CPU core
    threads_per_job: int | None = (
        None  # None: torch's default for one job at a time, an equal share for several
    )
    gpus: tuple[str, ...] | None = None  # handed out, one per job; None: all, if several jobs run at a time
    on_failure: str = "continue"  # or "stop", which starts no further job

    @property
    def num_at_once(self) -> int:
        """Number of jobs at a time, with -1 replaced."""
        return num_cores() if self.n_jobs == -1 else self.n_jobs

    @property
    def threads(self) -> int | None:
        """CPU threads of a job by default; None leaves the number to torch."""
        if self.threads_per_job is not None or self.num_at_once == 1:
            return self.threads_per_job
        share = max(1, num_cores() // self.num_at_once)
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return min(share, int(asked)) if asked.isdigit() and int(asked) else share

    def gpus_of_jobs(self, num_visible: int) -> tuple[str, ...]:
        """Return the values of `CUDA_VISIBLE_DEVICES` for jobs in turn; none if they inherit ours.

        Args:
            num_visible: Number of CUDA devices that a process sees.
        """
        if self.gpus is not None:
            return self.gpus
        if self.num_at_once == 1 or num_visible == 0:
            return ()
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").strip(",")
        return tuple(named.split(",")[:num_visible]) if named else tuple(map(str, range(num_visible)))


def read_options(n_jobs: Any, threads_per_job: Any, gpus: Any, on_failure: Any) -> Options:
    """Return the checked options.

    Raises:
        ConfigError: A value is not valid.
    """
    if not is_whole(n_jobs, -1) or n_jobs == 0:
        raise ConfigError(
            f"hydra.launcher.n_jobs={n_jobs!r} must be a number of jobs from 1, or -1 for one per CPU core"
        )
    if threads_per_job is not None and not is_whole(threads_per_job, 1):
        raise ConfigError(
            f"hydra.launcher.threads_per_job={threads_per_job!r} must be a number of threads from 1, or null"
        )
    checked_choice("on_failure", on_failure, ("continue", "stop"))
    if gpus is None:
        return Options(n_jobs, threads_per_job, None, on_failure)
    listed = gpus if isinstance(gpus, Sequence) and not isinstance(gpus, str) else [gpus]
    if not listed or not all(is_whole(each) or isinstance(each, str) for each in listed):
        raise ConfigError(
            f"hydra.launcher.gpus={gpus!r} must be a list of CUDA devices, e.g. [0,1], or null for all visible ones"
        )
    return Options(n_jobs, threads_per_job, tuple(map(str, listed)), on_failure)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
