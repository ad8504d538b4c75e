"""Signals that stop the program: where they may interrupt, and what a second and a third one do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REQUEUE = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Signals that a scheduler sends before a time limit or a pre-emption: save, then ask to be started again."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, *REQUEUE)
"""Signals that stop the program."""

ONE_REQUEST_S = 2.0
"""Seconds within which several signals are one request: slurmstepd and srun each send SIGTERM, some 10 ms apart."""


class StopRequested(BaseException):
    """The user or the system asked the program to stop.

    Attributes:
        signum: The signal that asked first.
        exit_code: 128 + signum: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum


class StopAtOnce(StopRequested):
    """The same, raised wherever the program happened to be: nothing in memory may be trusted or saved."""


class StopFlag:
    """Records whether a signal has arrived."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def raise_if_set(self) -> None:
        """Raise `StopRequested` if a signal has come."""
        if self.signum is not None:
            raise StopRequested(self.signum)


@contextmanager
def deferred_signals() -> Iterator[StopFlag]:
    """Inside, the first of `SIGNALS` sets the flag that is handed out, to be looked at where stopping is safe.

    A second signal raises `StopAtOnce`, a third ends the process. Signals within `ONE_REQUEST_S` count as one.
    """
    flag = StopFlag()
    with _handled(flag):
        yield flag


@contextmanager
def raising_signals() -> Iterator[None]:
    """Inside, the first of `SIGNALS` raises `StopAtOnce`: for work that can be done again.

    A second signal, while what the first interrupted is being cleaned up, ends the process: cleaning up that
    is itself interrupted would leave worker processes behind and wait for them forever.
    """
    with _handled(None):
        yield


class _Request:
    """The first signal of a program, and when one last counted."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.counted_at = -ONE_REQUEST_S


class _Stages:
    """What the next signal does: set the flag, if there is one; raise; end the process."""

    def __init__(self, flag: StopFlag | None, request: _Request) -> None:
        self.request = request
        self._flag = flag
        self._raised = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        request, now = self.request, time.monotonic()
        if request.signum is not None and now - request.counted_at < ONE_REQUEST_S:
            return
        request.counted_at = now
        request.signum = first = request.signum or signum
        if self._flag is not None and self._flag.signum is None:
            self._flag.signum = first
        elif not self._raised:
            self._raised = True
            raise StopAtOnce(first)
        else:
            os._exit(128 + first)


@contextmanager
def _handled(flag: StopFlag | None) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers in the main thread only: the signals stay that thread's
        return
    outer = signal.getsignal(signal.SIGTERM)
    # A second signal may arrive when the context in which the first came has been left.
    stages = _Stages(flag, outer.request if isinstance(outer, _Stages) else _Request())
    before = {signum: signal.signal(signum, stages) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
