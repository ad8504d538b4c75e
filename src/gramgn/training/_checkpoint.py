"""Checkpoints: whole or not there. Only tensors and plain Python types, loaded with ``weights_only=True``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gramgn.errors import InputError, first_line
from gramgn.records import atomic_file

FORMAT = 1
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"


class Checkpoints:
    """The checkpoints of one run: the last, the one before it, and the best by validation loss.

    Args:
        folder: Made on first save.
        identity: Says whose checkpoints these are; one with another identity is refused.
    """

    def __init__(self, folder: Path, identity: str = "") -> None:
        self.folder = folder
        self._identity = identity

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write ``state`` as the last checkpoint and keep the one before it.

        At any moment, a kill or a full disk included, a loadable checkpoint is left.

        Raises:
            InputError: If the disk does not take it; what was there is still there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        last = self.folder / LAST
        with atomic_file(last) as temporary:
            content = {"format": FORMAT, "identity": self._identity, **state}
            _save({**content, "digest": digest(content)}, temporary)
            if last.exists():
                _link(last, self.folder / PREVIOUS)
        if is_best:
            _link(last, self.folder / BEST)

    def load(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Return the last checkpoint that loads, saying so if that is not the newest; None if there is none.

        Raises:
            InputError: If there are checkpoints and none of them loads.
        """
        broken = []
        for name in (LAST, PREVIOUS):
            path = self.folder / name
            if not path.exists():
                continue
            try:
                state = read_checkpoint(path)
            except Exception as error:  # a damaged pickle can raise anything; whatever it is, it is told
                broken.append(f"{path}: {first_line(error)}")
                continue
            if self._identity and state["identity"] != self._identity:
                raise InputError(
                    f"{path} was not written by this run as its run.json describes it: the checkpoint is another "
                    "run's, or run.json was edited. Put the right one back, or start a new run"
                )
            if broken:
                say(f"checkpoint {broken[0]}\ngoing on from {path} (epoch {state['epoch']}) instead")
            return state
        if broken:
            raise InputError("no checkpoint of this run can be loaded:\n  " + "\n  ".join(broken))
        return None


def load_weights(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the last checkpoint's network weights of another run, for a warm start.

    Raises:
        InputError: If the folder holds no loadable checkpoint.
    """
    state = Checkpoints(folder).load(say)
    if state is None:
        raise InputError(
            f"there is no checkpoint in {folder}: the run stopped before its first epoch was done"
        )
    weights: dict[str, Any] = state["model"]
    return weights


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, atomically: it costs no space and no copying."""
    temporary = target.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    os.link(source, temporary)
    temporary.replace(target)


def digest(value: Any) -> str:
    """Return a sha256 over every tensor's bytes and every plain value; torch does not check what it loads."""
    sha = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            sha.update(f"{part.dtype}{list(part.shape)}".encode())
            sha.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(part, dict):
            for key, item in part.items():
                sha.update(f"{key!r}:".encode())
                add(item)
        elif isinstance(part, list | tuple):
            sha.update(f"{len(part)}[".encode())
            for item in part:
                add(item)
        else:
            sha.update(repr(part).encode())

    add(value)
    return sha.hexdigest()


def _save(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint.

    Raises:
        OSError: The disk does not take it; torch's writer calls that an internal error.
    """
    try:
        torch.save(content, path)
    except RuntimeError as error:
        raise OSError(f"torch could not write it; is the disk full? ({first_line(error)})") from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of one checkpoint file.

    Raises:
        ValueError: It is not of this format, or is not what was written.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"not a checkpoint of format {FORMAT}")
    told = state.pop("digest", None)
    if told != digest(state):
        raise ValueError("its content is not what was written")
    return state
