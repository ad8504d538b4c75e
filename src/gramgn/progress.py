"""Progress for people and for logs: a bar on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def say(message: str) -> None:
    """Write one plain line to stderr, above a progress bar if one is drawn.

    If stderr is closed (`2>&1 | head`) or a file on a full disk, the work continues: what matters is in the records.
    """
    with suppress(OSError):
        tqdm.write(message, file=sys.stderr)


def duration(seconds: float) -> str:
    """Return a duration to read, e.g. `"3.2 s"`, `"2 min 05 s"` or `"2 h 05 min"`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def track(items: Iterable[T], *, total: int, label: str, unit: str = "it") -> Iterator[T]:
    """Iterate over `items` and show how far it is.

    On a terminal this is a bar; elsewhere one plain line about every tenth of the way, at most one a second.

    Args:
        items: What to iterate over.
        total: Number of items expected.
        label: What is being done, e.g. `"preparing rsna at 64x64"`.
        unit: What one item is called.
    """
    if sys.stderr.isatty():
        yield from tqdm(items, total=total, desc=label, unit=unit, dynamic_ncols=True, leave=False)
        return
    start = said_at = time.monotonic()
    next_share = 0.1
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if done >= next_share * total and done < total and now - said_at >= 1.0:
            said_at, next_share = now, next_share + 0.1 * (1 + int(10 * (done / total - next_share)))
            say(f"{label}: {done} of {total} {unit}, {now - start:.0f} s")
