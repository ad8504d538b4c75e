"""What each job of a sweep asks Slurm for."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import util
from typing import Any

from gramgn.errors import ConfigError, checked_choice, is_whole, nearest

_FROM = {"nodes": 1, "ranks": 1, "cpus": 1, "gpus": 0, "array_parallelism": 1, "signal_s": 1}
_OPTIONAL = ("partition", "account", "cpus", "mem")


@dataclass(frozen=True)
class Resources:
    """The settings of `conf/hydra/launcher/slurm.yaml`, which explains them, and `on_failure`."""

    partition: str | None = None
    account: str | None = None
    time: int | str = 60
    nodes: int = 1
    ranks: int = 1
    cpus: int | None = None
    gpus: int = 0
    mem: int | str | None = None
    array_parallelism: int = 256
    signal_s: int = 120
    setup: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    on_failure: str = "continue"

    @property
    def num_at_once(self) -> int:
        """Number of jobs at a time."""
        return self.array_parallelism

    @property
    def threads(self) -> int | None:
        """CPU threads of a rank by default; None leaves the number to torch."""
        return self.cpus

    def parameters(self, job_name: str) -> dict[str, Any]:
        """Return the parameters of submitit's `SlurmExecutor`."""
        srun = ["--kill-on-bad-exit=1"]
        if self.cpus is not None:
            srun.append(f"--cpus-per-task={self.cpus}")  # srun does not take it over from sbatch
        path = shlex.quote(os.pathsep.join(each for each in sys.path if each))
        found: dict[str, Any] = {
            "job_name": job_name,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "nodes": self.nodes,
            "ntasks_per_node": self.ranks // self.nodes,
            "cpus_per_task": self.cpus,
            "gpus_per_node": self.gpus * self.ranks // self.nodes or None,
            "mem": self.mem,
            "array_parallelism": self.array_parallelism,
            "signal_delay_s": self.signal_s,
            "setup": [*self.setup, f"export PYTHONPATH={path}"],
            "stderr_to_stdout": True,
            "srun_args": srun,
            "additional_parameters": {"requeue": True, **self.options},
        }
        return {key: value for key, value in found.items() if value is not None}


def read_resources(given: Mapping[str, Any], on_failure: Any) -> Resources:
    """Return the checked settings.

    Raises:
        ConfigError: A value is not valid, or submitit or Slurm is not installed here.
    """
    names = [each.name for each in fields(Resources) if each.name != "on_failure"]
    for name, value in given.items():
        if name not in names:
            raise ConfigError(
                f"there is no hydra.launcher.{name} of hydra/launcher=slurm{nearest(name, names)}. Its keys: "
                f"{', '.join(names)}; further options of sbatch go into hydra.launcher.options"
            )
        if (problem := _problem(name, value)) is not None:
            raise ConfigError(f"hydra.launcher.{name}={value!r} must be {problem}")
    checked_choice("on_failure", on_failure, ("continue", "stop"))
    found = Resources(**{**given, "setup": tuple(given.get("setup") or ())}, on_failure=on_failure)
    if found.ranks % found.nodes:
        raise ConfigError(
            f"hydra.launcher.ranks={found.ranks} must be a multiple of hydra.launcher.nodes={found.nodes}"
        )
    if util.find_spec("submitit") is None:
        raise ConfigError("hydra/launcher=slurm needs the extra slurm: python -m pip install '.[slurm]'")
    if missing := [name for name in ("sbatch", "squeue", "srun") if shutil.which(name) is None]:
        raise ConfigError(
            f"hydra/launcher=slurm: {', '.join(missing)} not found: start the command on a login node of a Slurm "
            "cluster. On this machine, hydra/launcher=isolated runs several jobs at a time"
        )
    return found


def _problem(name: str, value: Any) -> str | None:
    """Return what a setting must be; None if it is that."""
    if value is None and name in _OPTIONAL:
        return None
    if name in _FROM:
        return None if is_whole(value, _FROM[name]) else f"a number from {_FROM[name]}"
    if name == "setup":
        is_right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return None if is_right else 'a list of shell commands, e.g. ["module load cuda"]'
    if name == "options":
        return None if isinstance(value, Mapping) else "options of sbatch with their values, e.g. {qos: high}"
    also = {"time": "a number of minutes, or ", "mem": "a number of MB, or "}.get(name, "")
    if also and is_whole(value, 1):
        return None
    example = {"time": " such as 1-12:00:00", "mem": " such as 16G"}.get(name, "")
    return None if isinstance(value, str) and value else f"{also}a text{example}"
