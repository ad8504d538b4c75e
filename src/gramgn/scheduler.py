"""Schedulers that start a job again, Slurm and torchrun: the job that this process belongs to, and Slurm's queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping

from gramgn.errors import first_line
from gramgn.progress import say
from gramgn.stopping import REQUEUE

REQUEUE_TIMEOUT_S = 30.0
RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
"""States of jobs that will not work again; `GONE` stands for a job that Slurm does not know any more."""

WAITING = (
    "CONFIGURING",
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
)
"""States of jobs that will work."""

GONE = "GONE"
QUEUE_TIMEOUT_S = 60.0


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a name of the job that stays the same when it is started again, None outside a scheduler's job."""
    if job := environment.get("SLURM_JOB_ID"):
        return f"slurm {job}"
    if run := environment.get("TORCHELASTIC_RUN_ID"):
        return (
            f"torchrun {run} {os.getppid()}"  # unless it is told otherwise, torchrun calls every run "none"
        )
    return None


def is_restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the scheduler has started this job before."""
    return any(environment.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def is_to_be_requeued(signum: int) -> bool:
    """Return whether a job that stopped because of this signal shall start again.

    Slurm itself requeues only what it has to kill: not a job that ends when it is told to make way for another one.
    """
    return signum in REQUEUE or (signum == signal.SIGTERM and is_preempted())


def requeue() -> bool:
    """Ask Slurm to start this job again, and return whether it will; False outside a job of Slurm.

    To be called last: Slurm sends SIGTERM to the job at once, which is ignored from here on.
    """
    job = _slurm_job()
    if job is None or os.environ.get("SLURM_PROCID", "0") != "0":
        return False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=REQUEUE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stdout", None) or "").strip() or first_line(error)
        say(
            f"warning: Slurm does not requeue job {job} ({words}): submit it again, or resume the run by hand"
        )
        return False
    say(f"Slurm starts job {job} again; it will continue here")
    return True


def _slurm_job() -> str | None:
    """Return Slurm's name of this job, None outside one.

    The number of an array's last job is that of the array, all of which would be requeued with it.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def is_preempted() -> bool:
    """Return whether Slurm is stopping this job to make room for another one."""
    if (job := _slurm_job()) is None:
        return False
    shown = _answer(["scontrol", "--oneliner", "show", "job", job], REQUEUE_TIMEOUT_S)
    return shown is not None and re.search(r"\bPreemptTime=\d", shown) is not None


def job_states() -> dict[str, str] | None:
    """Return the state of each of this user's jobs, also of those that ended in the last minutes.

    Returns:
        Slurm's words, e.g. `{"12_0": "RUNNING", "14": "PENDING"}`; None if Slurm does not answer.
    """
    return _queue("all", "%T")


def pending_reasons() -> dict[str, str]:
    """Return why each pending job of this user waits, in Slurm's words, e.g. `{"14": "PartitionTimeLimit"}`."""
    return _queue("PENDING", "%r") or {}


def _queue(states: str, column: str) -> dict[str, str] | None:
    command = ["squeue", "--noheader", "--array", f"--states={states}", f"--user={os.getuid()}"]
    shown = _answer([*command, f"--format=%i|{column}"], QUEUE_TIMEOUT_S)
    if shown is None:
        return None
    return dict(line.strip().split("|", 1) for line in shown.splitlines() if "|" in line)


def _answer(command: list[str], timeout_s: float) -> str | None:
    """Return what one of Slurm's commands prints; None if it fails or does not answer."""
    try:
        found = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            start_new_session=True,  # Ctrl-C on a terminal is not meant for it
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout


def is_live(state: str) -> bool:
    """Return whether a job in this state works or will do so."""
    return state not in (*ENDED, GONE)
