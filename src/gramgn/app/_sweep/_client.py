"""The fork server as the process that runs a sweep sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe

from gramgn.app._sweep._server import GRACE_S
from gramgn.app._sweep._tasks import Ended, Task

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from gramgn.app._sweep._server import main
sys.exit(main({fd}, {modules!r}))
"""


class ServerGoneError(Exception):
    """The fork server has ended although nobody asked it to: somebody, or the system, killed it."""


class ForkServer:
    """Starts at once and imports in the background, while this process does other things.

    Args:
        modules: What children need: imported once.
        environment: Variables of the server, and so of all children, beside those of this process.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._connection, theirs = Pipe(duplex=True)
        self._next = 0
        self._outstanding = 0
        program = _PROGRAM.format(path=sys.path, fd=theirs.fileno(), modules=list(modules))
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()

    def hold(self, descriptor: int) -> None:
        """Let the server keep a file open, and so locked, until it and its children have ended."""
        self._send("hold")
        with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
            socket.send_fds(channel, [b"."], [descriptor])

    def start(self, task: Task) -> int:
        """Start a child and return the number that :class:`Ended` will name it by.

        Raises:
            ServerGoneError: The server was killed.
        """
        self._next += 1
        self._send("start", self._next, task)
        self._outstanding += 1
        return self._next

    def signal(self, signum: int) -> None:
        """Send a signal to all children.

        Raises:
            ServerGoneError: The server was killed.
        """
        self._send("signal", signum)

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the children that have ended, after at most ``timeout_s``.

        Raises:
            ServerGoneError: The server was killed.
        """
        found: list[Ended] = []
        try:
            while self._connection.poll(0 if found else timeout_s):
                found.append(self._connection.recv())
                self._outstanding -= 1
        except (EOFError, ConnectionError) as error:
            if found:
                return found
            raise ServerGoneError from error
        return found

    def close(self, *, at_once: bool = False) -> None:
        """End the server; children that still run are stopped, and killed if that takes too long.

        Args:
            at_once: Do not wait for children; they end soon after, where the system tells them.
        """
        self._connection.close()
        if at_once or not self._outstanding:
            self._process.kill()  # it may be in the middle of its imports, and has nothing to lose
        try:
            self._process.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, *message: object) -> None:
        try:
            self._connection.send(message)
        except ConnectionError as error:
            raise ServerGoneError from error
