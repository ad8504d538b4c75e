"""Files and folders that are whole once they have their name: fsync, renames, full disks."""

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
from gramgn.locks import locked
from gramgn.workers import check_main_guard

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def writing(folder: Path, option: str, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError raised while writing below `folder` into one DataError.

    Args:
        folder: Where the block writes.
        option: Option that chooses the folder, for the message.
        needed_bytes: Total space that the block needs, for the message.

    Raises:
        DataError: The disk is full or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        free = f", {free_bytes(folder) / 2**20:,.1f} MiB free" if full else ""
        needed = f", about {needed_bytes / 2**20:,.1f} MiB needed" if full and needed_bytes else ""
        raise DataError(
            f"cannot write to {error.filename or folder}: {error.strerror}{free}{needed}. "
            f"{'Free some space' if full else 'Make it writable'} or choose another folder with "
            f"{option}=<folder>, then run again; nothing incomplete is left under a final name"
        ) from error


@contextlib.contextmanager
def building(folder: Path, option: str, needed_bytes: int, doing: str) -> Iterator[Path]:
    """Build a folder in one process at a time, whole or not at all.

    The block gets the path of a hidden folder next to `folder`. If the block creates it and ends without an error,
    the hidden folder takes the place of `folder`; otherwise it is removed. After `kill -9`, the next call removes it.

    Args:
        folder: What is built; its parent is created.
        option: Option that chooses the folder, for messages.
        needed_bytes: Total space that the block needs, for messages.
        doing: What another process does meanwhile, for a message, e.g. `"preparing"`.

    Raises:
        DataError: The disk is full or the folder cannot be written.
    """
    check_main_guard()
    with writing(folder.parent, option, needed_bytes):
        folder.parent.mkdir(parents=True, exist_ok=True)
        busy = f"another process is {doing} {folder.name}; waiting for it"
        with locked(folder.with_name(f".{folder.name}.lock"), busy, wait=True):
            new = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(new, ignore_errors=True)
            try:
                yield new
                if new.is_dir():
                    _replace_folder(new, folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that holds `folder` or its nearest existing parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def flush(stream: IO[bytes] | IO[str]) -> None:
    """Write a stream's content to the disk itself (fsync)."""
    stream.flush()
    os.fsync(stream.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file with its line ends unchanged on every system, and flush it to the disk."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        flush(stream)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _replace_folder(new: Path, target: Path) -> None:
    """Put the finished folder `new` in the place of `target`, which never holds a part of it."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    _flush_folder(new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    _flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(PermissionError):  # Windows cannot open folders.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
