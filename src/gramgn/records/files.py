"""Crash-safe writing: a file holds its old content or its new content, never half of each."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gramgn.errors import InputError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an error, its content replaces `path`.

    The new content is on disk (fsync) before it takes the name, so a kill or a power cut at any moment leaves the old
    file or the new one. If the block raises, `path` stays as it was and the temporary file is removed. The folder must
    exist.

    Raises:
        InputError: The disk is full or the folder cannot be written; the message names the file.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise InputError(
            f"cannot write {path.absolute()}: {error.strerror or error}. What was there before is unchanged. Free "
            "some space or repair the permissions, then start again (resume=<run folder> continues a run)."
        ) from error
    finally:
        if temporary.exists():  # on a read-only file system even removing nothing is an error
            temporary.unlink()


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a whole file atomically; text is encoded as UTF-8.

    Raises:
        InputError: The disk is full or the folder cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def read_regular(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read, or is something else, such as a named pipe, which would be read forever.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
