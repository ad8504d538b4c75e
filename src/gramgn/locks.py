"""Locks between processes. The operating system releases a lock when its process ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gramgn.errors import InputError
from gramgn.progress import say

# A process that only looks whether a lock is held holds it for a moment itself.
GLANCE_S = 0.3


@contextmanager
def locked(file: Path, busy: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock while the block runs.

    Args:
        file: The lock file; it is created in an existing folder and stays there.
        busy: Message when another process holds the lock.
        wait: Report `busy` and wait for the other process instead of raising.

    Raises:
        InputError: Another process holds the lock, or the file cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        lock.acquire(timeout=GLANCE_S)
    except Timeout:
        if not wait:
            raise InputError(busy) from None
        say(busy)
        lock.acquire()
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def is_locked(file: Path) -> bool:
    """Return whether another process holds the lock; False if the file is missing or cannot be opened."""
    from filelock import FileLock, Timeout

    if not file.is_file():
        return False
    try:
        with FileLock(file).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False
