"""Writing that cannot be taken for whole when it is not: locks, flushed files, renames, full disks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gramgn.errors import DataError
from gramgn.progress import say

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows has no flock; two processes are then not kept apart.
    fcntl = None  # type: ignore[assignment]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs; wait, saying so, while another process holds it.

    The operating system releases the lock when the process ends, however it ends. The file stays.
    """
    with path.open("ab") as stream:
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = path.name.removeprefix(".").removesuffix(".lock")
                say(f"another process is preparing {what}; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing(folder: Path, option: str, needed_bytes: int = 0) -> Iterator[None]:
    """Turn what the operating system says while writing below ``folder`` into one DataError.

    Args:
        folder: Where the block writes.
        option: Option that chooses the folder, for the message.
        needed_bytes: Space that the block needs in all, for the message.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        free = f", {_mebibytes(free_bytes(folder))} free" if full else ""
        needed = f", about {_mebibytes(needed_bytes)} needed" if full and needed_bytes else ""
        raise DataError(
            f"cannot write to {error.filename or folder}: {error.strerror}{free}{needed}. "
            f"{'Free some space' if full else 'Make it writable'} or choose another folder with "
            f"{option}=<folder>, then run again; nothing there passes for whole, and finished work is kept"
        ) from error


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that holds ``folder`` or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def flush(stream: IO[bytes] | IO[str]) -> None:
    """Push what was written to the disk itself."""
    stream.flush()
    os.fsync(stream.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, lines ending as given on every system, and flush it to the disk."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        flush(stream)


def flush_folder(folder: Path) -> None:
    """Push a folder's list of names to the disk, where the system can."""
    with contextlib.suppress(PermissionError):  # Windows opens no folders.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_folder(new: Path, target: Path) -> None:
    """Put the finished folder ``new`` in the place of ``target``; no part of it is ever under that name."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    flush_folder(new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"
