"""Checkpoints, written whole or not at all. Tensors and plain Python types only, loaded with `weights_only=True`."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gramgn.errors import InputError, first_line
from gramgn.records import atomic_file

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"


class Checkpoints:
    """The checkpoints of one run: the last, the one before it, and the best by validation loss.

    Args:
        folder: Created by the first save.
        identity: Identifies the run; a checkpoint with another identity is rejected.
    """

    def __init__(self, folder: Path, identity: str = "") -> None:
        self.folder = folder
        self._identity = identity

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write `state` as the last checkpoint and keep the one before it.

        A loadable checkpoint exists at every moment, also after a kill or on a full disk.

        Raises:
            InputError: Writing failed; the former checkpoints are still there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        last = self.folder / LAST
        with atomic_file(last) as temporary:
            try:
                torch.save({"identity": self._identity, **state}, temporary)
            except RuntimeError as error:  # how torch's writer reports a full disk
                raise OSError(f"torch could not write it; is the disk full? ({first_line(error)})") from error
            if last.exists():
                _link(last, self.folder / PREVIOUS)
        if is_best:
            _link(last, self.folder / BEST)

    def load(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Return the last checkpoint that loads, or None if there is none; `say` reports if it is not the newest.

        Raises:
            InputError: None of the checkpoints loads, or they are another run's.
        """
        broken = []
        for name in (LAST, PREVIOUS):
            path = self.folder / name
            if not path.exists():
                continue
            try:
                state = read_checkpoint(path)
            except Exception as error:  # a damaged file can raise anything
                broken.append(f"{path}: {first_line(error)}")
                continue
            if self._identity and state["identity"] != self._identity:
                raise InputError(
                    f"{path} was not written by this run as its run.json describes it: the checkpoint is another "
                    "run's, or run.json was edited. Put the right one back, or start a new run"
                )
            if broken:
                say(f"checkpoint {broken[0]}\nresuming from {path} (epoch {state['epoch']}) instead")
            return state
        if broken:
            raise InputError("no checkpoint of this run can be loaded:\n  " + "\n  ".join(broken))
        return None


def load_weights(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the network weights in the last checkpoint of another run, for a warm start.

    Raises:
        InputError: The folder holds no loadable checkpoint.
    """
    state = Checkpoints(folder).load(say)
    if state is None:
        raise InputError(
            f"there is no checkpoint in {folder}: the run stopped before its first epoch was done"
        )
    weights: dict[str, Any] = state["model"]
    return weights


def _link(source: Path, target: Path) -> None:
    """Give a file a second name atomically, without copying it."""
    temporary = target.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    os.link(source, temporary)
    temporary.replace(target)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of one checkpoint file.

    Raises:
        ValueError: The file is not a checkpoint, or its content is not what was written.
    """
    with zipfile.ZipFile(path) as archive:  # torch itself does not compare the checksums that it writes
        if archive.testzip() is not None:
            raise ValueError("its content is not what was written")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or "identity" not in state:
        raise ValueError("not a checkpoint of this program")
    return state
