"""A job of a sweep on a node of a cluster: what Slurm starts, once per rank, and starts again after a requeue."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramgn.app import OUTPUT_FILE, one_line_warning, set_repository
from gramgn.errors import InputError
from gramgn.scheduler import is_preempted, is_to_be_requeued, requeue
from gramgn.stopping import StopAtOnce, StopRequested, deferred_signals, raising_signals
from gramgn.sweep.job import WITHHELD, ended_by, run, write_to
from gramgn.sweep.review import Cell, review

if TYPE_CHECKING:
    from gramgn.training import Ranks


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
    node = submitit.JobEnvironment()
    is_first = node.global_rank == 0
    ranks = None
    try:
        with raising_signals():
            if is_first:
                node.paths.result_pickle.unlink(missing_ok=True)
                command = " ".join(cell.job.overrides)
                write_to(cell.folder / OUTPUT_FILE, f"Slurm job {node.job_id} on {node.hostname}: {command}")
            with deferred_signals() as stop:  # torch crashes if importing it is interrupted
                import torch

                import gramgn.sweep.preload
            if stop.signum is not None:
                raise StopAtOnce(stop.signum)
            if threads is not None:
                torch.set_num_threads(threads)
            ranks = gramgn.training.join()
            return run(ranks.from_first(lambda: _reviewed(cell)), {})
    except BaseException as raised:
        error = raised if ranks is None else ranks.explained(raised)
        is_signalled = isinstance(error, StopRequested) and is_to_be_requeued(error.signum)
        # A job that cannot even begin to train before its time limit would be started for ever.
        is_in_vain = isinstance(error, StopAtOnce) and not is_preempted()
        if is_first and is_signalled and not is_in_vain and requeue():
            _leave(ranks)
        result = ended_by(error)
        if is_signalled and is_in_vain:
            result["message"] += " before it could save anything: raise hydra.launcher.time or signal_s"
        return result
    finally:
        atexit.register(_leave, ranks)  # once submitit has written the result


def _reviewed(cell: Cell) -> Cell:
    found = review(cell)
    if found.action == "reject":
        raise InputError(found.reason)
    return found


def _leave(ranks: Ranks | None) -> None:
    """End this process, after the other ranks of the run if it is the first."""
    if ranks is not None:
        ranks.leave(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
