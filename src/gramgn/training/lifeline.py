"""Connections by which the ranks of a run learn at once that one of them has ended, which one, and how.

A collective of torch only fails, or waits until its timeout, and names nobody. The system closes a connection when its
process ends, however it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gramgn.errors import JobFailedError

GRACE_S = 3.0
"""Seconds that a rank has to end by itself, in a long step perhaps, after another one has ended."""
ANSWER_S = 1.0
DIED, FAILED, STOPPED, DONE, PING, PONG = "died", "failed", "stopped", "done", "ping", "pong"


@dataclass(frozen=True)
class Verdict:
    """How a rank ended before the run was done.

    Attributes:
        rank: Which one.
        how: `"died"` (without a word), `"failed"` or `"stopped"`.
        message: The error in one line.
        details: A traceback, or nothing.
        signum: The signal that stopped it, else 0.
    """

    rank: int
    how: str
    message: str = ""
    details: str = ""
    signum: int = 0


class Store(Protocol):
    """Where the ranks meet: torch's key-value store."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value."""


class Lifeline:
    """Watches the other ranks in a thread: rank 0 all of them, each of them rank 0, which passes on what happens.

    If this process has not begun to end `GRACE_S` after another one has, it is ended here.

    Args:
        rank: Number of this process.
        size: Number of processes.
        store: The key-value store of all ranks.
        address: Host of rank 0; None if all ranks are on this machine.
        timeout_s: Seconds that the others have to appear.

    Attributes:
        last_words: Called with the verdict before this process is ended.
    """

    def __init__(self, rank: int, size: int, store: Store, *, address: str | None, timeout_s: float) -> None:
        self.last_words: Callable[[Verdict], None] = lambda verdict: None
        self._rank, self._timeout_s = rank, timeout_s
        self._verdict: Verdict | None = None
        self._changed = threading.Condition()
        self._ended: set[int] = set()
        self._answered: set[int] = set()
        self._ends, self._sends = threading.Event(), threading.Lock()
        if rank == 0:
            self._peers = _accept(size, store, address, timeout_s)
        else:
            self._peers = {0: _connect(rank, store, timeout_s)}
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def verdict(self, wait_s: float = 0.0) -> Verdict | None:
        """Return how another rank ended, None if none has within `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None, wait_s)
            return self._verdict

    def ends(self) -> None:
        """Declare that this process has begun to end by itself."""
        self._ends.set()

    def tell(self, verdict: Verdict) -> None:
        """Tell the others how this process ends."""
        self.ends()
        self._send(asdict(verdict))

    def done(self) -> None:
        """Declare that this rank's part of the run is done, so that its end is no failure."""
        self.ends()
        if self._rank:
            self._send({"how": DONE})

    def leave(self) -> None:
        """Wait until all ranks are done, rank 0 last, or have ended, at most as long as for their start."""
        self.done()
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= set(self._peers), self._timeout_s)
        if not self._rank:
            self._send({"how": DONE})

    def silent(self) -> list[int]:
        """Return the ranks that do not answer rank 0: they are stopped or their machine is gone."""
        with self._changed:
            self._answered.clear()
        self._send({"how": PING})
        with self._changed:
            self._changed.wait_for(lambda: self._answered | self._ended >= set(self._peers), ANSWER_S)
            return sorted(set(self._peers) - self._answered - self._ended)

    def _send(self, message: dict[str, Any], *, without: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sends:
            for peer, connection in self._peers.items():
                if peer != without:
                    with suppress(OSError):  # that one has ended
                        connection.sendall(line)

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        rest = dict.fromkeys(self._peers, b"")
        for peer, connection in self._peers.items():
            selector.register(connection, selectors.EVENT_READ, peer)
        while selector.get_map():
            for key, _ in selector.select():
                peer, data = key.data, b""
                with suppress(OSError):
                    data = self._peers[peer].recv(1 << 16)
                *lines, rest[peer] = (rest[peer] + data).split(b"\n")
                for line in lines:
                    self._receive(peer, json.loads(line))
                if not data:
                    selector.unregister(self._peers[peer])
                    if peer not in self._ended:
                        self._receive(peer, asdict(Verdict(peer, DIED)))

    def _receive(self, peer: int, message: dict[str, Any]) -> None:
        if message["how"] == PING:
            self._send({"how": PONG})
            return
        with self._changed:
            if message["how"] == PONG:
                self._answered.add(peer)
            else:
                self._ended.add(message.get("rank", peer))
            if message["how"] in (DIED, FAILED, STOPPED) and self._verdict is None:
                self._verdict = Verdict(**message)
                threading.Thread(target=self._end_if_stuck, args=(self._verdict,), daemon=True).start()
                if self._rank == 0:
                    self._send(message, without=peer)
            self._changed.notify_all()

    def _end_if_stuck(self, verdict: Verdict) -> None:
        if not self._ends.wait(GRACE_S):
            try:
                self.last_words(verdict)
            finally:
                os._exit(128 + verdict.signum if verdict.signum else 1)


def _accept(size: int, store: Store, address: str | None, timeout_s: float) -> dict[int, socket.socket]:
    """Return the connections of rank 0, by rank. Whoever does not know the token is not one of us."""
    token = secrets.token_hex(16)
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1" if address is None else "", 0), backlog=size) as server:
        server.settimeout(timeout_s)
        host, port = address or "127.0.0.1", server.getsockname()[1]
        store.set("lifeline", json.dumps([host, port, token]))
        while len(peers) < size - 1:
            try:
                connection, _ = server.accept()
                connection.settimeout(timeout_s)
                given, _, rank = _first_line(connection).partition(" ")
            except TimeoutError as error:
                missing = sorted(set(range(1, size)) - set(peers))
                raise JobFailedError(
                    f"error: rank {', '.join(map(str, missing))} of {size} did not appear within {timeout_s:.0f} s"
                ) from error
            connection.settimeout(None)
            if given == token:
                peers[int(rank)] = connection
            else:
                connection.close()
    return peers


def _first_line(connection: socket.socket) -> str:
    """Return what a connection begins with, up to the end of the line and not a byte further."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 100 and (byte := connection.recv(1)):
        line += byte
    return line.decode(errors="replace").strip()


def _connect(rank: int, store: Store, timeout_s: float) -> socket.socket:
    host, port, token = json.loads(store.get("lifeline"))
    connection = socket.create_connection((host, port), timeout=timeout_s)
    connection.settimeout(None)
    connection.sendall(f"{token} {rank}\n".encode())
    return connection
