"""Data sets for tests that stop a preparation half-way; importable by worker processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from gramgn.data import AFAD, Decode, Decoded, Item

PAUSE_S = 0.02


@dataclass(frozen=True)
class SlowDecoder:
    """Decodes as AFAD does, slowly; a photo named ``doomed`` kills the process that decodes it."""

    inner: Decode
    doomed: str = ""

    def __call__(self, item: Item) -> Decoded:
        """Wait, decode."""
        time.sleep(PAUSE_S)
        if item.key == self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(item)


class SlowAFAD(AFAD):
    """AFAD, decoded slowly."""

    doomed = ""

    def decoder(self, size: int) -> Decode:
        """Return the slow decoder."""
        return SlowDecoder(super().decoder(size), self.doomed)


def prepare_slowly(root: str, prepared: str, workers: int) -> None:
    """Prepare in a process of its own; called by ``python -c``."""
    SlowAFAD(Path(root), prepared_root=prepared, workers=workers).prepare(16)
