"""Worker processes that leave Ctrl-C to their parent and never outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

from gramgn.errors import DataError

Submit = Callable[..., "Future[Any]"]


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def worker_pool(
    workers: int, *, died: str, setup: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> Iterator[Submit]:
    """Hand out the ``submit`` of a pool of fresh processes; unstarted work is cancelled at the end.

    Args:
        workers: Number of processes.
        died: What to say if one of them dies, out of memory for instance.
        setup: Called in each process before its work.
        arguments: Given to ``setup``.

    Raises:
        DataError: With ``died``, if a process died.
    """
    # "spawn": a fork would copy the parent's threads' locks, torch's among them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(setup, arguments))

    def submit(function: Callable[..., Any], *args: Any) -> Future[Any]:
        with _interrupts_held_back():
            return pool.submit(function, *args)

    try:
        yield submit
    except BrokenProcessPool as error:
        raise DataError(
            f"{died} Out of memory? Then use dataset.workers=1. Called from your own script? Then its code "
            "must stand under if __name__ == '__main__'. Finished work is kept: run the same command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold back Ctrl-C while a worker may be started: it inherits the mask and never hears it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(setup: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    """Set up a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if setup is not None:
        setup(*arguments)


def _end_with_parent() -> None:
    """End this worker when its parent is gone, even by kill -9: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
