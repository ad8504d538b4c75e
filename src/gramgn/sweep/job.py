"""The child process of a sweep: it checks all jobs, or runs one of them. torch is imported only here."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gramgn.app import OUTPUT_FILE, Job, one_line_warning, set_repository
from gramgn.errors import InputError, first_line
from gramgn.progress import say
from gramgn.records import RunFolder, idle_epochs_note, is_incidental, override_key
from gramgn.stopping import SIGNALS, StopRequested, raising_signals
from gramgn.sweep.review import Cell

GRACE_S = 10.0
"""Seconds that a stopped job has to save its work before it is killed."""

WITHHELD = ("WANDB_RUN_ID", "WANDB_SWEEP_ID")
"""Variables that jobs do not inherit: a sweep of W&B itself would take all of our jobs for a single run."""


@dataclass(frozen=True)
class Task:
    """What a child process is to do."""

    cells: tuple[Cell, ...]  # all jobs to check, or the one job to run
    is_check: bool  # jobs are only built, without their data
    root: Path  # the repository
    environment: Mapping[str, str]  # all environment variables of the child
    threads: int | None  # of a job that does not set `trainer.threads`; None leaves the number to torch
    git: dict[str, Any]  # state of the code when the sweep was started, which is the code that runs


def perform(task: Task, sender: Connection) -> None:
    """Do a task in this fresh process and send its result.

    Ctrl-C on a terminal must reach only the process that runs the sweep, which passes it on: the child leaves the
    process group. The signals that stop it, which it inherits blocked, are unblocked once they have handlers.
    """
    os.setpgid(0, 0)
    # What is imported already stays out of collections: children share those pages.
    gc.freeze()
    os.environ.clear()
    os.environ.update(task.environment)
    set_repository(task.root)
    # Its own lock is a semaphore that outlives a process that is killed, with a warning at the end of the sweep.
    tqdm.set_lock(threading.RLock())
    warnings.formatwarning = one_line_warning
    try:
        if not task.is_check:
            write_to(task.cells[0].folder / OUTPUT_FILE, " ".join(task.cells[0].job.overrides))
        with raising_signals():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            threading.Thread(target=_end_with_parent, daemon=True).start()
            if task.threads is not None:
                import torch

                torch.set_num_threads(task.threads)
            result = check(task) if task.is_check else run(task.cells[0], task.git)
    except BaseException as error:
        result = ended_by(error)
    sys.stdout.flush()
    with suppress(BrokenPipeError):  # the process that runs the sweep is gone
        sender.send(result)


def run(cell: Cell, git: dict[str, Any]) -> dict[str, Any]:
    """Run a job, unless it is finished, and return its state, exit code, message and best validation loss."""
    from gramgn.app import train
    from gramgn.training import join

    def job() -> Job:
        if cell.action == "restart":
            _clear(RunFolder(cell.folder))
        return _job(cell, git)

    record = train(join().from_first(job)) if cell.is_open else dict(cell.record or {})
    diverged = record["state"] == "diverged"
    return {
        "state": record["state"],
        "exit_code": 3 if diverged else 0,
        "message": (record.get("error") or {}).get("message", "")
        or idle_epochs_note(RunFolder(cell.folder).read_metrics()),
        "val_loss": None if diverged else (record.get("best") or {}).get("val_loss"),
    }


def check(task: Task) -> dict[str, Any]:
    """Build every job without its data; return what is wrong with each, None for nothing, and the number of GPUs.

    Counting the GPUs initializes CUDA, so only a process that ends afterwards may do it.
    """
    import torch

    faults = [_fault(cell, task.git) for cell in task.cells]
    return {"state": "done", "exit_code": 0, "faults": faults, "num_gpus": torch.cuda.device_count()}


def _fault(cell: Cell, git: dict[str, Any]) -> str | None:
    from gramgn.app import build_parts

    try:
        build_parts(_job(cell, git))
    except InputError as error:
        return str(error)
    except Exception as error:
        # A user-defined class: it fails again in its job, which then writes the traceback to its log.
        return f"{type(error).__name__}: {first_line(error, 400)}"
    finally:
        gc.collect()
    return None


def _job(cell: Cell, git: dict[str, Any]) -> Job:
    if cell.action != "resume":
        return replace(cell.job, git=git)
    from gramgn.app import resumed_job

    # What identifies the job was compared with its run.json; only the rest may have changed.
    keys = {each: override_key(each) for each in cell.job.overrides}
    own = ("name", "resume", "on_failure")
    changed = [each for each, key in keys.items() if is_incidental(key) and key not in own]
    return resumed_job(cell.job.config, changed, cell.folder, git=git)


def _clear(folder: RunFolder) -> None:
    """Remove the records of a run without an epoch, so that it can restart; its logs stay."""
    for path in (folder.run_json, folder.path / ".lock", folder.path / "local.json", folder.metrics_csv):
        path.unlink(missing_ok=True)


def write_to(log: Path, command: str) -> None:
    """Send all output of this process to a file, after what earlier starts wrote there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    say(f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {command}")


def _end_with_parent() -> None:
    """Stop this process when the one that runs the sweep is gone; kill it, and what it started, after a while."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def ended_by(error: BaseException) -> dict[str, Any]:
    """Return the result of a job that raised, and write to its log what is needed to mend it."""
    from gramgn.app import outcome

    state, exit_code = outcome(error)
    if isinstance(error, InputError):
        message = str(error)
        say(f"error: {message}")
    elif isinstance(error, StopRequested | KeyboardInterrupt):
        message = str(error) or "stopped"
        state, exit_code = "interrupted", getattr(error, "exit_code", 130)
        say(message)
    else:
        message = f"{type(error).__name__}: {first_line(error, 400)}"
        say("".join(traceback.format_exception(error)).rstrip("\n"))
    return {"state": state, "exit_code": exit_code, "message": message[:4000], "val_loss": None}
