"""What a child of the fork server does: check all jobs of a sweep, or do one of them."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gramgn.app._job import build_parts, train
from gramgn.app._main import one_line_warning
from gramgn.app._plan import Job, resumed_job
from gramgn.app._recording import outcome
from gramgn.app._repository import set_repository
from gramgn.app._sweep._tasks import Cell, Task
from gramgn.errors import InputError, first_line
from gramgn.records import RunFolder, is_incidental, override_key
from gramgn.stopping import StopRequested, raising_signals

LONGEST_MESSAGE = 4000


def perform(task: Task, pipe: int) -> int:
    """Do a task in this fresh process, send its result through the pipe and return the exit code."""
    os.environ.update(task.environment)
    set_repository(task.root)
    warnings.formatwarning = one_line_warning
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    result: dict[str, Any]
    try:
        if task.log is not None:
            _write_to(task.log, task.jobs[0][0].overrides)
        with raising_signals():
            result = check(task) if task.kind == "check" else run(task)
    except BaseException as error:
        result = _ended_by(error)
    _send(pipe, result)
    return int(result["exit_code"])


def run(task: Task) -> dict[str, Any]:
    """Do the one job and return its state, exit code and best validation loss."""
    ((cell, action),) = task.jobs
    if action == "anew":
        _forget(RunFolder(cell.folder))
    record = train(_job(cell, action, task.git))
    diverged = record["state"] == "diverged"
    return {
        "state": record["state"],
        "exit_code": 3 if diverged else 0,
        "message": (record.get("error") or {}).get("message", ""),
        "val_loss": None if diverged else (record.get("best") or {}).get("val_loss"),
    }


def check(task: Task) -> dict[str, Any]:
    """Build every job without its data and return what is wrong with each, ``None`` for nothing.

    Also returns how many CUDA devices there are; only a process that ends afterwards may ask that.
    """
    faults = [_fault(cell, action) for cell, action in task.jobs]
    return {"state": "done", "exit_code": 0, "faults": faults, "num_gpus": torch.cuda.device_count()}


def _fault(cell: Cell, action: str) -> str | None:
    try:
        build_parts(_job(cell, action, None))
    except InputError as error:
        return str(error)
    except Exception as error:
        # Somebody's own class: it will fail again in its job, which then writes the traceback to its log.
        return f"{type(error).__name__}: {first_line(error, 400)}"
    finally:
        gc.collect()
    return None


def _job(cell: Cell, action: str, git: dict[str, Any] | None) -> Job:
    if action == "resume":
        # What identifies the job is in its run.json, and was compared; the rest may have been given anew.
        changed = [each for each in cell.overrides if _may_change(override_key(each))]
        return resumed_job(cell.config, changed, cell.folder, git=git)
    return Job(cell.config, cell.choices, list(cell.overrides), cell.folder, cell.group, git=git)


def _may_change(key: str) -> bool:
    return is_incidental(key) and key not in ("name", "resume", "on_failure")


def _forget(folder: RunFolder) -> None:
    """Take away the records of a run that holds no epoch, so that it can begin anew; its logs stay."""
    for path in (folder.run_json, folder.path / ".lock", folder.path / "local.json", folder.metrics_csv):
        path.unlink(missing_ok=True)


def _write_to(log: Path, overrides: Sequence[str]) -> None:
    """Let everything that this process says go to a file; what former starts wrote there stays."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab", buffering=0)
    except OSError as error:
        raise InputError(f"cannot write {log}: {error.strerror or error}") from error
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    file.close()
    print(f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {' '.join(overrides)}", file=sys.stderr)


def _ended_by(error: BaseException) -> dict[str, Any]:
    """Return the result of a job that raised, and say in its log what a person needs to mend it."""
    state, exit_code = outcome(error)
    if isinstance(error, InputError):
        message = str(error)
        print(f"error: {message}", file=sys.stderr)
    elif isinstance(error, StopRequested | KeyboardInterrupt):
        message = str(error) or "stopped"
        state, exit_code = "interrupted", getattr(error, "exit_code", 130)
        print(message, file=sys.stderr)
    else:
        message = f"{type(error).__name__}: {first_line(error, 400)}"
        traceback.print_exception(error)
    return {"state": state, "exit_code": exit_code, "message": message[:LONGEST_MESSAGE], "val_loss": None}


def _send(pipe: int, result: Mapping[str, Any]) -> None:
    sys.stdout.flush()
    rest = memoryview(json.dumps(result).encode())
    while rest:
        rest = rest[os.write(pipe, rest) :]
