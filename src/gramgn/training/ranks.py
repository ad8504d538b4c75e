"""The processes that do one run together: who they are, what they agree on in every step, and how one of them ends.

Every rank runs the same code on the same configuration, with its own share of each batch. Only rank 0 writes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gramgn.errors import ConfigError, InputError, JobFailedError, first_line
from gramgn.stopping import StopAtOnce, StopFlag, StopRequested
from gramgn.training.lifeline import DIED, FAILED, STOPPED, Lifeline, Verdict
from gramgn.world import World, world

T = TypeVar("T")

TIMEOUT_S = 300.0
"""Seconds that a rank waits for another one: to appear, and in each exchange."""
PREPARATION = timedelta(days=7)
NOTICE_S = 1.0
PR_SET_PDEATHSIG = 1


class RankFailedError(JobFailedError):
    """Another rank ended before the run was done.

    Attributes:
        details: Its traceback, if it sent one.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Ranks:
    """The processes of a run.

    Args:
        mine: This process among them; None if it is alone, where every method does the obvious.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.

    Raises:
        JobFailedError: One of them does not appear.
    """

    def __init__(self, mine: World | None = None) -> None:
        self.rank, self.size = (0, 1) if mine is None else (mine.rank, mine.size)
        self._mine = mine
        self._cause: BaseException | None = None
        self._last_words: Callable[[BaseException], None] = lambda error: None
        if mine is not None:
            _end_with_launcher()
            self._store = _meet(mine)
            address = None if mine.is_local else mine.address
            self._lifeline = Lifeline(mine.rank, mine.size, self._store, address=address, timeout_s=TIMEOUT_S)
            self._lifeline.last_words = self._end_stuck

    @property
    def is_first(self) -> bool:
        """Whether this process writes records and reports for all."""
        return self.rank == 0

    def from_first(self, function: Callable[[], T]) -> T:
        """Return what `function` returns on rank 0, where alone it is called; it must be picklable."""
        if self._mine is None:
            return function()
        content: list[Any] = [function() if self.is_first else None]
        dist.broadcast_object_list(content, src=0)
        result: T = content[0]
        return result

    def share(self, index: Tensor) -> Tensor:
        """Return this rank's part of a batch's indices [b]: consecutive, equal to within one, perhaps empty."""
        begin, end, _ = self.span(len(index))
        return index[begin:end]

    def span(self, count: int) -> tuple[int, int, int]:
        """Return begin and end of this rank's part of `count` samples, and the size of the largest part."""
        least, more = divmod(count, self.size)
        begin = self.rank * least + min(self.rank, more)
        return begin, begin + least + (self.rank < more), least + (more > 0)

    def sums(self, *numbers: float) -> list[float]:
        """Return the sums over all ranks, in float64."""
        if self._mine is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def agree(self, stop: StopFlag) -> None:
        """Raise `StopRequested` on all ranks if one of them has received a signal."""
        if self._mine is None:
            stop.raise_if_set()
            return
        asked = torch.tensor([stop.signum or 0])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if signum := int(asked):
            raise StopRequested(signum)

    def meet(self) -> None:
        """Wait until all ranks have come here, so that a clock read now is that of the slowest."""
        if self._mine is not None:
            dist.all_reduce(torch.zeros(1))

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks have called this, however long that takes."""
        if self._mine is not None:
            # Not an exchange of the group: that would time out while another rank prepares data for an hour.
            self._store.set(f"{what}/{self.rank}", "")
            self._store.wait([f"{what}/{rank}" for rank in range(self.size)], PREPARATION)

    def seed(self, *numbers: int) -> None:
        """Seed torch on all ranks but the first, whose state checkpoints keep: dropout must differ by rank."""
        if not self.is_first:
            text = ":".join(map(str, ("rank", self.rank, *numbers)))
            torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)

    def wrapped(self, module: Any) -> Any:
        """Return a module as it is called for a gradient, which is then the mean over ranks."""
        return module if self._mine is None else nn.parallel.DistributedDataParallel(module)

    def device_name(self, name: str) -> str:
        """Return the name of this rank's device, given the value of `trainer.device`.

        Raises:
            ConfigError: It names one device for all ranks.
        """
        if self._mine is None:
            return name
        if name.startswith("cuda:"):
            raise ConfigError(f"trainer.device={name} is one device for {self.size} ranks: give auto or cuda")
        if name not in ("auto", "cuda") or not torch.cuda.is_available():
            return name
        return f"cuda:{self._mine.local_rank % torch.cuda.device_count()}"

    def watch(self, last_words: Callable[[BaseException], None]) -> None:
        """Have a function record the cause where the rank that would do so has died, or hangs when another one ends."""
        self._last_words = last_words

    def explained(self, error: BaseException) -> BaseException:
        """Return the cause of an error: what ended another rank, or the error itself, of which the others then hear."""
        if self._mine is None:
            return error
        if self._cause is None:
            self._lifeline.ends()
            verdict = self._blamed(error)
            self._cause = error if verdict is None else _as_error(verdict)
            if verdict is not None and self._speaks_for_first(verdict):
                self._speak(self._cause)
        return self._cause

    def _blamed(self, error: BaseException) -> Verdict | None:
        """Return how another rank caused an error; if it is our own, tell the others and return None."""
        if type(error) is StopRequested:  # all ranks have agreed on it
            self.done()
            return None
        # Whoever waits for a rank that has ended sees a RuntimeError of torch, perhaps before we know of the end.
        is_exchange = isinstance(error, RuntimeError)
        verdict = self._lifeline.verdict(
            (NOTICE_S if self.is_first else 3 * NOTICE_S) if is_exchange else 0.0
        )
        if verdict is None and is_exchange and self.is_first and (silent := self._lifeline.silent()):
            verdict = Verdict(silent[0], DIED, "does not answer")
            self._lifeline.tell(verdict)
        if verdict is not None and (
            is_exchange or (isinstance(error, StopAtOnce) and verdict.how != STOPPED)
        ):
            return verdict
        self._lifeline.tell(_as_verdict(self.rank, error))
        return None

    def _speaks_for_first(self, verdict: Verdict) -> bool:
        """Return whether it is for this rank to record the end, because rank 0 is gone."""
        return self.rank == 1 and verdict.rank == 0 and verdict.how == DIED

    def _end_stuck(self, verdict: Verdict) -> None:
        if self.is_first or self._speaks_for_first(verdict):
            self._speak(_as_error(verdict))

    def _speak(self, error: BaseException) -> None:
        print(f"error: {error}", file=sys.__stderr__, flush=True)
        self._last_words(error)

    def done(self) -> None:
        """Declare that this rank's part of the run is done: from here on its end is no failure of the run."""
        if self._mine is not None:
            self._lifeline.done()

    def leave(self, code: int) -> None:
        """End this process with an exit code once all ranks are done; a process alone returns."""
        if self._mine is None:
            return
        if self._cause is None or type(self._cause) is StopRequested:
            self._lifeline.leave()
            verdict = self._lifeline.verdict()
            if verdict is not None and self._speaks_for_first(verdict):
                self._speak(_as_error(verdict))  # it may have died while it wrote the last record
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # gloo's threads end some processes by a signal when they are destroyed


ALONE = Ranks()
_joined = ALONE


def join() -> Ranks:
    """Return the processes that this one was started with by torchrun or srun; the first call lets them meet.

    Raises:
        ConfigError: The environment lacks what they need to meet.
        JobFailedError: One of them does not appear.
    """
    global _joined  # torch has one default group per process
    if _joined is ALONE and (mine := world()) is not None:
        _joined = Ranks(mine)
    return _joined


def _meet(mine: World) -> Any:
    """Form torch's default process group and return its key-value store."""
    timeout = timedelta(seconds=TIMEOUT_S)
    is_host = mine.rank == 0 and not mine.is_met
    try:
        store: Any = dist.TCPStore(mine.address, mine.port, mine.size, is_host, timeout)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"gramgn/{mine.attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(store=store, rank=mine.rank, world_size=mine.size, timeout=timeout)
    except RuntimeError as error:
        raise JobFailedError(
            f"error: {mine.size} ranks could not meet at {mine.address}:{mine.port} ({first_line(error)}). Set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        ) from error
    return store


def _end_with_launcher() -> None:
    """Have torchrun's end, which may be kill -9, stop this process like SIGTERM."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _as_error(verdict: Verdict) -> BaseException:
    if verdict.how == STOPPED:
        return StopAtOnce(verdict.signum)
    if verdict.how == DIED:
        what = verdict.message or "ended without a word (killed, or out of memory?)"
        return RankFailedError(f"rank {verdict.rank} {what}")
    return RankFailedError(f"rank {verdict.rank} failed: {verdict.message}", verdict.details)


def _as_verdict(rank: int, error: BaseException) -> Verdict:
    if isinstance(error, StopRequested):
        return Verdict(rank, STOPPED, signum=error.signum)
    if isinstance(error, InputError | JobFailedError):
        return Verdict(rank, FAILED, str(error))
    details = "".join(traceback.format_exception(error))
    return Verdict(rank, FAILED, f"{type(error).__name__}: {first_line(error, 400)}", details)
