"""Locks between processes, on one machine or on several that share a disk.

On one machine the operating system holds a lock and releases it when its process ends, however it ends. Such a lock
may be unknown to the other machines that share the disk. So the process that holds a lock also writes its host,
process and job into a note next to the lock file, and renews the note's time stamp every few seconds: its heartbeat.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gramgn.errors import InputError
from gramgn.progress import say

# A process that only looks whether a lock is held holds it for a moment itself.
GLANCE_S = 0.3
BEAT_S = 10.0
STALE_S = 60.0
"""Seconds without a heartbeat after which another host takes a lock over."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock; `token` distinguishes the times that it does."""

    host: str
    pid: int
    job: str | None = None  # Slurm's number of its job
    starts: int = 0  # how often Slurm had started that job again
    token: str = ""

    def __str__(self) -> str:
        place = "" if self.is_here else f" on {self.host}"
        return f"process {self.pid}{place}" + (f", Slurm job {self.job}" if self.job else "")

    @classmethod
    def own(cls) -> Holder:
        """Return this process as a holder."""
        job, starts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT") or "0"
        return cls(socket.gethostname(), os.getpid(), job, int(starts), secrets.token_hex(4))

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def was_restarted(self) -> bool:
        """Whether its job is that of this process, which Slurm has started again since."""
        own = Holder.own()
        return self.job is not None and self.job == own.job and self.starts < own.starts


def holder(file: Path) -> Holder | None:
    """Return who holds a lock, or held it when it was killed; None if nobody does, or if that is not readable."""
    try:
        return Holder(**json.loads(_note(file).read_text()))
    except (OSError, ValueError, TypeError):
        return None


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
        with _noted(file, busy, wait=wait):
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
            return _age_elsewhere(file) <= STALE_S
    except Timeout:
        return True
    except OSError:
        return False


def _note(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


@contextmanager
def _noted(file: Path, busy: str, *, wait: bool) -> Iterator[None]:
    """Keep a note with a heartbeat while the block runs; this process holds the lock of the operating system.

    Raises:
        InputError: A process of another host holds the lock.
    """
    _await_other_host(file, busy, wait=wait)
    own = Holder.own()
    note, fresh = _note(file), _note(file).with_suffix(f".{own.token}.tmp")
    with suppress(OSError):  # on a full disk the lock holds on this machine only
        try:
            fresh.write_text(json.dumps(asdict(own)))
            fresh.replace(note)
        finally:
            fresh.unlink(missing_ok=True)
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(file, own, ended), daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        if holder(file) == own:
            note.unlink(missing_ok=True)


def _await_other_host(file: Path, busy: str, *, wait: bool) -> None:
    """Return once no process of another host holds the lock.

    A note that is young may be that of a process that was killed just now: it is watched until its next heartbeat.
    """
    first, told = _age_elsewhere(file), False
    start = time.monotonic()
    while (age := _age_elsewhere(file)) <= STALE_S:
        if age < first + time.monotonic() - start - 1:  # the note has been renewed
            if not wait:
                raise InputError(busy)
            if not told:
                say(busy)
            told = True
        time.sleep(0.5)


def _age_elsewhere(file: Path) -> float:
    """Return the seconds since the last heartbeat of a holder on another host; infinite if there is none.

    To be called by the process that holds the lock of the operating system: a holder on this host has ended then.
    """
    other = holder(file)
    if other is None or other.is_here or other.was_restarted:
        return float("inf")
    try:
        with tempfile.TemporaryFile(dir=file.parent) as new:  # by the clock of the file server, as the note's
            now = os.fstat(new.fileno()).st_mtime
    except OSError:  # this user may only read
        now = time.time()
    try:
        return now - _note(file).stat().st_mtime
    except OSError:  # it has been released
        return float("inf")


def _beat(file: Path, own: Holder, ended: threading.Event) -> None:
    """Renew the note until the event; end this process at once if another host has taken the lock over."""
    pause = 1.0  # first of all, whether two hosts have taken the lock at the same moment
    while not ended.wait(pause):
        pause = BEAT_S
        other = holder(file)
        if other is not None and other != own:
            say(
                f"error: {other} has taken over {file.parent}, since nothing was heard from here. This one ends"
            )
            os._exit(1)
        with suppress(OSError):  # a file server that does not answer for a moment
            os.utime(_note(file))
