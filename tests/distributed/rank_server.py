"""Forks ranks of `train.py` from a process that has imported torch once: a start takes a tenth of a second.

Reads one JSON object per line and answers each with one: `{"words", "root", "environment", "output"}` starts a process
and returns its number, `{"wait", "seconds"}` returns its exit code, or null if it still runs then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hydra.utils  # noqa: F401
import torch._dynamo  # noqa: F401

from gramgn.app import train, train_command  # noqa: F401 - what a rank imports anyway
from gramgn.training import Stepper


def start(order: dict[str, Any]) -> int:
    """Fork a process that runs a command line; what it prints goes to a file."""
    if pid := os.fork():
        return pid
    os.setsid()
    os.environ.update(order["environment"])
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    os.chdir(order["root"])
    output = os.open(order["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if seconds := os.environ.get("TEST_TIMEOUT_S"):
        sys.modules["gramgn.training.ranks"].TIMEOUT_S = float(seconds)  # type: ignore[attr-defined]
    if steps := os.environ.get("STOP_AFTER"):
        stop_after(int(steps))
    try:
        code = train_command(order["words"], Path(order["root"]))
        sys.stderr.flush()
    except BaseException as error:
        print(repr(error), file=sys.__stderr__, flush=True)
        code = 99
    os._exit(code)


def stop_after(steps: int) -> None:
    """Let the last rank get SIGTERM in its step of that number."""
    call, taken = Stepper.__call__, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        if len(taken) == steps and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return call(*args, **kwargs)

    Stepper.__call__ = counted  # type: ignore[method-assign]


def wait(order: dict[str, Any]) -> int | None:
    """Return the exit code of a process, minus the signal that ended it."""
    end = time.monotonic() + order["seconds"]
    while True:
        pid, status = os.waitpid(order["wait"], os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.01)


if __name__ == "__main__":
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(wait(given) if "wait" in given else start(given)), flush=True)
