"""Runs of `train.py` on several ranks over loopback, as torchrun or srun would start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from house import BLOBS, PLUGIN, House

# 45 training samples: batches of 13 leave 6 for the last one, whose shares are uneven on four ranks.
SAMPLES = ("dataset=blobs", "dataset.num_images=60", "trainer=debug", "tracking=none", "trainer.threads=1")
UNEVEN = (*SAMPLES, "model=resnet_gn", "trainer.dtype=float64", "trainer.batch_size=13")


class Server:
    """A process that ranks are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()


class Started:
    """Ranks that were started; `pids[r]` is the process of rank r."""

    def __init__(self, server: Server, house: House, size: int, words: tuple[str, ...], **extra: str) -> None:
        self._server = server
        self.output = house.root / f"ranks-{time.monotonic_ns()}.txt"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        several = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        several |= {
            "LOCAL_WORLD_SIZE": str(size),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(PLUGIN),
            "HOME": str(house.root),
        }
        self.pids = [
            server.ask(
                words=[*BLOBS, *words],
                root=str(house.root),
                output=str(self.output),
                environment=several | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | extra,
            )
            for rank in range(size)
        ]

    def send(self, signum: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], signum)

    def codes(self, seconds: float = 60) -> list[int]:
        """Return the exit codes; fail, with what was printed, if a rank has not ended in time."""
        end = time.monotonic() + seconds
        found = [self._server.ask(wait=pid, seconds=max(end - time.monotonic(), 0)) for pid in self.pids]
        if None in found:
            self.send(signal.SIGKILL, *(rank for rank, code in enumerate(found) if code is None))
            raise AssertionError(f"{found} after {seconds} s: {self.text()}")
        return found

    def text(self) -> str:
        return self.output.read_text()


Launch = Callable[..., Started]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return a process that ranks are forked from."""
    process = Server()
    yield process
    process.close()


@pytest.fixture
def launch(server: Server, house: House) -> Launch:
    """Return a function that starts ranks in the house: their number, the words, environment variables."""

    def start(size: int, *words: str, **extra: str) -> Started:
        return Started(server, house, size, words, **extra)

    return start
