"""The fork server: a process that has imported what jobs need and forks one child a job.

It never touches CUDA and has one thread, so that its children start clean in a few hundredths of a second. It lives
in a session of its own, where a terminal's Ctrl-C does not reach it. If the process that started it is gone, it asks
its children to stop, waits a little, kills the rest and ends; if it is killed itself, Linux asks the children to stop.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from gramgn.app._sweep._tasks import Ended, Task

GRACE_S = 10.0  # what a child has to save its work after it was asked to stop
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def main(descriptor: int, modules: Sequence[str]) -> int:
    """Serve until the other end is closed; in a child, do its task.

    Args:
        descriptor: The socket to the process that gives the tasks.
        modules: What to import before the first child.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = _Server(Connection(descriptor))
    for module in modules:
        importlib.import_module(module)
    # Objects in the permanent generation are not touched by collections: children share their pages.
    gc.freeze()
    task, pipe = server.serve()
    if task is None:
        return 0
    from gramgn.app._sweep._child import perform

    code = perform(task, pipe)
    # Not sys.exit: taking apart all that was imported costs a second. Like multiprocessing, run what was registered.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Child:
    """A child that is running: its number, its result so far, and the pipe that it comes through."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number, self.pipe, self.received = number, pipe, bytearray()

    def drain(self) -> None:
        while True:
            try:
                part = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                return
            self.received += part

    def result(self) -> dict[str, Any] | None:
        """Return what it said in full; None for nothing, or a message that a kill cut off."""
        self.drain()
        try:
            found: dict[str, Any] = json.loads(self.received)
        except ValueError:
            return None
        return found


class _Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._children: dict[int, _Child] = {}
        self._prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
        self._woken, self._waker = os.pipe()
        self._held: list[int] = []
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        # Without a handler of Python's the wakeup descriptor is not written to.
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._waker)

    def serve(self) -> tuple[Task | None, int]:
        """Return no task where the work is over, and the task to do (with the pipe for its result) in a child."""
        while True:
            pipes = {child.pipe: child for child in self._children.values()}
            for ready in wait([self._connection, self._woken, *pipes]):
                if ready is self._connection:
                    try:
                        started = self._obey(*self._connection.recv())
                    except (EOFError, ConnectionError):
                        self._end_all()
                        return None, -1
                    if started is not None:
                        return started
                elif ready == self._woken:
                    _empty(self._woken)
                elif isinstance(ready, int):
                    pipes[ready].drain()
            self._reap()

    def _obey(self, order: str, *arguments: Any) -> tuple[Task, int] | None:
        if order == "start":
            return self._fork(*arguments)
        if order == "signal":
            self._signal(*arguments)
        else:  # "hold": a file to keep open, and so locked, for as long as any of our children lives
            with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
                _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
            self._held += descriptors
        return None

    def _fork(self, number: int, task: Task) -> tuple[Task, int] | None:
        reader, writer = os.pipe()
        server = os.getpid()
        child = os.fork()
        if child:
            os.close(writer)
            os.set_blocking(reader, False)
            self._children[child] = _Child(number, reader)
            return None
        os.close(reader)
        self._become_child(server)
        return task, writer

    def _become_child(self, server: int) -> None:
        """Leave the server's state behind: a group of its own, signals as usual, none of its descriptors."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._prctl is not None:
            self._prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != server:
                os._exit(128 + signal.SIGTERM)
        self._connection.close()
        for descriptor in (self._woken, self._waker, *(each.pipe for each in self._children.values())):
            os.close(descriptor)
        self._children.clear()

    def _reap(self) -> None:
        for process in list(self._children):
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                continue
            # What it started itself (workers that decode images) would keep its files open and locked.
            _kill_group(process, signal.SIGKILL)
            child = self._children.pop(process)
            ended = Ended(child.number, child.result(), os.waitstatus_to_exitcode(status))
            os.close(child.pipe)
            try:
                self._connection.send(ended)
            except ConnectionError:  # nobody is left to be told; the main loop finds that out next
                continue

    def _signal(self, signum: int) -> None:
        for process in self._children:
            if signum == signal.SIGKILL:
                _kill_group(process, signum)
            else:
                os.kill(process, signum)

    def _end_all(self) -> None:
        """Stop all children as the system's SIGTERM would, and kill those that take too long."""
        self._signal(signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while self._children and time.monotonic() < end:
            wait([self._woken], timeout=0.2)
            _empty(self._woken)
            self._reap()
        self._signal(signal.SIGKILL)
        for process in self._children:
            os.waitpid(process, 0)


def _kill_group(process: int, signum: int) -> None:
    try:
        os.killpg(process, signum)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS says so of a group that has only ended processes left
        return


def _empty(pipe: int) -> None:
    try:
        while os.read(pipe, 512):
            pass
    except BlockingIOError:
        return
