"""Decoding in worker processes that leave Ctrl-C to their parent and never outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection

from gramgn.data._decode import Decoder
from gramgn.data._types import Decoded, Item
from gramgn.errors import DataError

BYTES_PER_WORKER = 16 * 2**20
BYTES_PER_CHUNK = 4 * 2**20
MAX_CHUNK = 64

Result = Decoded | str
"""A decoded sample, or the message why there is none."""

_decoder: Decoder | None = None


def decode_all(
    decoder: Decoder, items: Sequence[Item], num_bytes: int, workers: int | None
) -> Generator[tuple[Item, Result], None, None]:
    """Decode items, in this process or in a pool, and yield them in order with their result.

    Args:
        decoder: What decodes.
        items: What to decode.
        num_bytes: Size of the raw files in all; little work is not worth a pool.
        workers: Number of processes; None for all cores, fewer for little work.

    Raises:
        DataError: A worker process died.
    """
    wanted = min(available_cores(), num_bytes // BYTES_PER_WORKER) if workers is None else workers
    if decoder.in_process or wanted <= 1 or len(items) <= 1:
        for item in items:
            yield item, _decode(decoder, item)
        return
    even = -(-len(items) // (4 * wanted))
    length = max(1, min(MAX_CHUNK, even, BYTES_PER_CHUNK * len(items) // max(num_bytes, 1)))
    chunks = [items[start : start + length] for start in range(0, len(items), length)]
    for chunk, results in _pooled(decoder, chunks, min(wanted, len(chunks))):
        yield from zip(chunk, results, strict=True)


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pooled(
    decoder: Decoder, chunks: list[Sequence[Item]], workers: int
) -> Iterator[tuple[Sequence[Item], list[Result]]]:
    # "spawn": a fork would copy the parent's threads' locks, torch's among them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(decoder,))
    waiting = iter(chunks)
    running: deque[tuple[Sequence[Item], Future[list[Result]]]] = deque()
    try:
        while True:
            for chunk in islice(waiting, 3 * workers - len(running)):
                with _interrupts_held_back():
                    running.append((chunk, pool.submit(_decode_chunk, chunk)))
            if not running:
                return
            chunk, future = running.popleft()
            yield chunk, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process of prepare died. Out of memory? Then use dataset.workers=1. Called from your "
            "own script? Then its code must stand under if __name__ == '__main__'. Finished work is kept"
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


def _start(decoder: Decoder) -> None:
    """Set up a worker process."""
    global _decoder
    _decoder = decoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is gone, even by kill -9: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _decode_chunk(items: Sequence[Item]) -> list[Result]:
    assert _decoder is not None
    return [_decode(_decoder, item) for item in items]


def _decode(decoder: Decoder, item: Item) -> Result:
    try:
        return decoder(item)
    except DataError as error:
        return str(error)
