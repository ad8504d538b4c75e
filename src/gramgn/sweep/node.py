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
from gramgn.scheduler import is_to_be_requeued, requeue
from gramgn.stopping import StopRequested, raising_signals
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
    if is_first:
        job.paths.result_pickle.unlink(missing_ok=True)
        write_to(
            cell.folder / OUTPUT_FILE,
            f"Slurm job {job.job_id} on {job.hostname}: {' '.join(cell.job.overrides)}",
        )
    # Ends the process once submitit has written the result: gloo may crash when an interpreter that used it ends.
    atexit.register(_leave)
    try:
        with raising_signals():
            if threads is not None:
                import torch

                torch.set_num_threads(threads)
            cell = review(cell)
            if cell.action == "reject":
                raise InputError(cell.reason)
            return run(cell, {})
    except BaseException as error:
        if is_first and isinstance(error, StopRequested) and is_to_be_requeued(error.signum) and requeue():
            _leave()
        return ended_by(error)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
