"""Decoding items in this process or in several, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice

from gramgn.data._decode import Decoder
from gramgn.data._pool import available_cores, worker_pool
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


def _pooled(
    decoder: Decoder, chunks: list[Sequence[Item]], workers: int
) -> Iterator[tuple[Sequence[Item], list[Result]]]:
    waiting = iter(chunks)
    running: deque[tuple[Sequence[Item], Future[list[Result]]]] = deque()
    died = "a worker process of prepare died."
    with worker_pool(workers, died=died, setup=_set_decoder, arguments=(decoder,)) as submit:
        while True:
            for chunk in islice(waiting, 3 * workers - len(running)):
                running.append((chunk, submit(_decode_chunk, chunk)))
            if not running:
                return
            chunk, future = running.popleft()
            yield chunk, future.result()


def _set_decoder(decoder: Decoder) -> None:
    global _decoder
    _decoder = decoder


def _decode_chunk(items: Sequence[Item]) -> list[Result]:
    assert _decoder is not None
    return [_decode(_decoder, item) for item in items]


def _decode(decoder: Decoder, item: Item) -> Result:
    try:
        return decoder(item)
    except DataError as error:
        return str(error)
