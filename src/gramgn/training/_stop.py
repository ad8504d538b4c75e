"""Ctrl-C and SIGTERM: stop at the next step, with a checkpoint, instead of anywhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(BaseException):
    """The user or the system asked the run to stop.

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
    """Set by the first signal; a second one raises :class:`StopAtOnce`."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def raise_if_set(self) -> None:
        """Raise :class:`StopRequested` if a signal has come."""
        if self.signum is not None:
            raise StopRequested(self.signum)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise StopAtOnce(signum)
        self.signum = signum


@contextmanager
def deferred_signals() -> Iterator[StopFlag]:
    """Inside, SIGINT and SIGTERM set the flag that is handed out; outside, they do what they did before.

    In a thread other than the main one, where Python allows no handlers, the flag is simply never set.
    """
    flag = StopFlag()
    with _handlers(flag._on_signal):
        yield flag


@contextmanager
def raising_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise :class:`StopAtOnce`: for work that can be done again."""

    def on_signal(signum: int, frame: FrameType | None) -> None:
        raise StopAtOnce(signum)

    with _handlers(on_signal):
        yield


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
