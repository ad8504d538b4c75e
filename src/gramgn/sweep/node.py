"""A job of a sweep on a node of a cluster: what Slurm starts, once per rank, and starts again after a requeue."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from gramgn.app import OUTPUT_FILE, one_line_warning, set_repository
from gramgn.errors import InputError
from gramgn.scheduler import is_preempted, is_to_be_requeued, requeue
from gramgn.stopping import StopAtOnce, StopRequested, deferred_signals, raising_signals
from gramgn.sweep.job import WITHHELD, ended_by, run, write_to
from gramgn.sweep.review import Cell, review


def work(cell: Cell, root: Path, threads: int | None) -> dict[str, Any]:
    """Do a job of a sweep and return its result; submitit calls this in a fresh process on the node.

    What is to be done is decided here, from what is in the run folder now: other starts of this job may have worked
    since it was submitted. A job that was told to save is requeued and has no result.

    Args:
        cell: The job.
        root: The repository.
        threads: CPU threads if the job does not set `trainer.threads`; None leaves the number to torch.
    """
    import submitit

    logging.getLogger("submitit").setLevel(logging.ERROR)
    set_repository(root)
    for name in WITHHELD:
        os.environ.pop(name, None)
    os.environ.update(cell.environment)
    warnings.formatwarning = one_line_warning
    job = submitit.JobEnvironment()
    is_first = job.global_rank == 0
    # Ends the process once submitit has written the result: gloo may crash when an interpreter that used it ends.
    atexit.register(_leave)
    try:
        with raising_signals():
            if is_first:
                job.paths.result_pickle.unlink(missing_ok=True)
                write_to(
                    cell.folder / OUTPUT_FILE,
                    f"Slurm job {job.job_id} on {job.hostname}: {' '.join(cell.job.overrides)}",
                )
            with deferred_signals() as stop:  # torch crashes if importing it is interrupted
                import torch

                import gramgn.sweep.preload  # noqa: F401
            if stop.signum is not None:
                raise StopAtOnce(stop.signum)
            if threads is not None:
                torch.set_num_threads(threads)
            cell = review(cell)
            if cell.action == "reject":
                raise InputError(cell.reason)
            return run(cell, {})
    except BaseException as error:
        is_signalled = isinstance(error, StopRequested) and is_to_be_requeued(error.signum)
        # A job that cannot even begin to train before its time limit would be started for ever.
        is_in_vain = isinstance(error, StopAtOnce) and not is_preempted()
        if is_first and is_signalled and not is_in_vain and requeue():
            _leave()
        result = ended_by(error)
        if is_signalled and is_in_vain:
            result["message"] += " before it could save anything: raise hydra.launcher.time or signal_s"
        return result


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
