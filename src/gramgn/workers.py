"""Worker processes that leave Ctrl-C to their parent and never outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

from gramgn.errors import DataError
from gramgn.progress import say
from gramgn.stopping import REQUEUE

T = TypeVar("T")
R = TypeVar("R")

QUEUED_PER_WORKER = 3


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_main_guard() -> None:
    """Raise RuntimeError in a worker process that is still importing its parent's script, which lacks a main guard.

    The standard library does so when such a worker starts its own processes. To be called before waiting for a
    lock: the parent may hold it, and both would wait forever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a worker process has run the script that started it; put the script's code under "
            "if __name__ == '__main__'"
        )


def map_in_processes(
    function: Callable[[T], R], tasks: Sequence[T], workers: int, *, died: str
) -> Iterator[R]:
    """Apply a picklable function to tasks in fresh processes and yield the results in order.

    Only a few tasks per worker are queued at a time; closing the iterator cancels those that have not started. If the
    workers would run the script of this process again, which has no main guard, this process does all the work.

    Args:
        function: What to apply.
        tasks: Its arguments.
        workers: Number of processes, at most one per task.
        died: Beginning of the message if a process dies.

    Raises:
        DataError: A process died, out of memory for instance.
    """
    if (script := _unguarded_script()) is not None:
        say(f"note: {script} has no if __name__ == '__main__': without it no worker processes are used")
        yield from map(function, tasks)
        return
    # "spawn": a fork would copy the locks that the parent's threads hold, torch's among them.
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(tasks))
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start)
    running: deque[Future[R]] = deque()
    waiting = iter(tasks)
    try:
        while True:
            for task in islice(waiting, QUEUED_PER_WORKER * workers - len(running)):
                running.append(pool.submit(function, task))
            if not running:
                return
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"{died} Out of memory? Use dataset.workers=1. Called from your own script? Put its code under "
            "if __name__ == '__main__'. Then run the same command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _unguarded_script() -> Path | None:
    """Return the script that this process runs if it has no main guard: every new process would run it again."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    is_guarded = not script.is_file() or b"__name__" in script.read_bytes()
    return None if is_guarded else script


def _start() -> None:
    """Set up a worker process: its parent handles Ctrl-C and requests to be requeued, and it ends with its parent."""
    with contextlib.suppress(ValueError):
        for signum in (signal.SIGINT, *REQUEUE):
            signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is gone, even by kill -9: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
