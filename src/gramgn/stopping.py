"""Ctrl-C and SIGTERM: where they may interrupt, and what a second and a third one do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(BaseException):
    """The user or the system asked the program to stop.

    Attributes:
        signum: The signal that asked.
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
    """Inside, SIGINT and SIGTERM set the flag that is handed out, to be looked at where stopping is safe.

    A second signal raises `StopAtOnce`, a third ends the process.
    """
    flag = StopFlag()
    with _handlers(_Stages(flag)):
        yield flag


@contextmanager
def raising_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `StopAtOnce`: for work that can be done again.

    A second signal, while what the first interrupted is being cleaned up, ends the process: cleaning up that
    is itself interrupted would leave worker processes behind and wait for them forever.
    """
    with _handlers(_Stages(None)):
        yield


class _Stages:
    """What the next signal does: set the flag, if there is one; raise; end the process."""

    def __init__(self, flag: StopFlag | None) -> None:
        self._flag = flag
        self._raised = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._flag is not None and self._flag.signum is None:
            self._flag.signum = signum
        elif not self._raised:
            self._raised = True
            raise StopAtOnce(signum)
        else:
            os._exit(128 + signum)


@contextmanager
def _handlers(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers in the main thread only: the signals stay that thread's
        return
    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
