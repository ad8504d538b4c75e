"""The processes that one run was started with, by torchrun or srun, as their environment describes them. No torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gramgn.errors import ConfigError
from gramgn.scheduler import RESTART_COUNTS

FIRST_PORT, NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class World:
    """The processes that do one run together.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes, at least 2.
        local_rank: Number of this process among those of its machine.
        address: Host of rank 0.
        port: Where the processes meet on that host.
        attempt: How often all of them were started before.
        is_met: Whether the launcher itself keeps the meeting point; otherwise rank 0 does.
        is_local: Whether all of them are on one machine.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    attempt: int
    is_met: bool
    is_local: bool


def world(environment: Mapping[str, str] = os.environ) -> World | None:
    """Return the processes that this one was started with by torchrun or srun; None for a process alone.

    Raises:
        ConfigError: There are several, but the environment lacks what they need to meet.
    """
    attempt = max((int(environment.get(name) or 0) for name in RESTART_COUNTS), default=0)
    if int(environment.get("WORLD_SIZE") or 1) > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in environment]:
            raise ConfigError(
                f"WORLD_SIZE={environment['WORLD_SIZE']} without {', '.join(missing)}: start several processes by "
                "torchrun --standalone --nproc-per-node=<number> train.py ..., or unset WORLD_SIZE"
            )
        rank, size, local_rank = (int(environment[name]) for name in names[:3])
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        is_met = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_local = int(environment.get("LOCAL_WORLD_SIZE") or 0) == size
        return World(rank, size, local_rank, address, port, attempt, is_met, is_local)
    # Not SLURM_NTASKS, which a batch script has as well: there, without srun, a process is alone.
    size = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if size == 1:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    is_local = environment.get("SLURM_STEP_NUM_NODES", "1") == "1"
    job, step = int(environment.get("SLURM_JOB_ID") or 0), int(environment.get("SLURM_STEP_ID") or 0)
    return World(
        rank=int(environment["SLURM_PROCID"]),
        size=size,
        local_rank=int(environment["SLURM_LOCALID"]),
        address=environment.get("MASTER_ADDR") or ("127.0.0.1" if is_local else first_node(nodes)),
        # Steps of one job, and jobs of one node, follow one another in number.
        port=int(environment.get("MASTER_PORT") or FIRST_PORT + (7 * job + step) % NUM_PORTS),
        attempt=attempt,
        is_met=False,
        is_local=is_local,
    )


def first_node(nodes: str) -> str:
    """Return the first name of a list of nodes as Slurm writes it: `"gpu[03-05,9],cpu1"` begins with `"gpu03"`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes!r} names no node: set MASTER_ADDR to the host of rank 0"
        )
    return "".join(part or "" for part in match.groups())


def hush(mine: World | None) -> None:
    """Drop what this process prints if it is not the first rank, which reports for all."""
    if mine is not None and mine.rank > 0:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process runs
