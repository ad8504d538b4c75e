"""Weights alone and a model card, in a folder of their own, for somebody who has nothing else of the run."""

from __future__ import annotations

import errno
import secrets
import shutil
from pathlib import Path

import torch

from gramgn.app.tools._card import model_card
from gramgn.app.tools._trained import Trained
from gramgn.errors import InputError, first_line

WEIGHTS, CARD = "weights.pt", "MODEL_CARD.md"


def export_run(trained: Trained, out: Path) -> list[Path]:
    """Write a network's weights and its model card into a new folder, both or none.

    Args:
        trained: The network.
        out: The folder, missing or empty.

    Returns:
        The files: a plain ``state_dict`` that loads with ``weights_only=True``, and the card.

    Raises:
        InputError: The folder holds something, or cannot be made.
    """
    out = out.resolve() if not out.is_symlink() else out.absolute()
    check_new(out)
    card = model_card(trained, WEIGHTS)
    weights = {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in trained.model.state_dict().items()
    }
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        torch.save(weights, partial / WEIGHTS)
        (partial / CARD).write_text(card, encoding="utf-8")
        _take_name(partial, out)
    except (OSError, RuntimeError) as error:  # torch tells a full disk as a RuntimeError
        raise InputError(
            f"cannot write {out}: {first_line(error)}. Nothing was written; choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / WEIGHTS, out / CARD]


def _take_name(partial: Path, out: Path) -> None:
    """Rename the finished folder; only an empty one gives way, whatever somebody put there meanwhile."""
    try:
        partial.rename(out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise InputError(_not_new(out)) from error
        raise


def check_new(out: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        InputError: It does, or it is a file.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InputError(_not_new(out))


def _not_new(out: Path) -> str:
    return f"out={out} is there already and is left as it is: an export never overwrites. Choose a new folder"
