"""The lock of a sweep or of the paper's chain, held until the last of its processes has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gramgn.errors import InputError
from gramgn.progress import say

# A process that was killed leaves children, which end within the fork server's grace.
PATIENCE_S = 15.0


def take_lock(file: Path, what: str, patience_s: float = PATIENCE_S) -> int:
    """Lock a file for this process and return its descriptor; closing it, or its end, lets go.

    The descriptor may be passed on to other processes: the lock is held until all of them have closed it. What is
    left of a process that was killed is waited for.

    Args:
        file: Made if it is missing; its folder must exist.
        what: What is locked, for messages, e.g. ``"the sweep in outputs/sweeps/mine"``.
        patience_s: Longest wait for what a killed process left behind, in seconds.

    Raises:
        InputError: Another process holds it, or it cannot be written.
    """
    # Not at the top: Windows has no such module, and everything else here works there.
    import fcntl

    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror or error}") from error
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            if _is_alive(holder) or time.monotonic() > end:
                os.close(descriptor)
                raise InputError(
                    f"{what} is running already, as process {holder or '?'}. Wait for it, or "
                    f"stop it with: kill -INT {holder or '<its number>'}"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            say(f"{file}: no file locks here ({error.strerror}); do not start {what} twice")
            return descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _is_alive(process: str) -> bool:
    if not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
