"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gramgn.errors import InputError
from gramgn.training import Checkpoints, load_weights, rng_state, set_rng_state


def state(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "model": {"w": torch.full((3,), float(epoch))}, "rng": rng_state()}


def test_save_keeps_last_previous_and_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for epoch in (1, 2, 3):
        checkpoints.save(state(epoch), is_best=epoch == 2)
    epochs = {path.name: torch.load(path)["epoch"] for path in checkpoints.folder.iterdir()}
    assert epochs == {"last.pt": 3, "previous.pt": 2, "best.pt": 2}


def test_loads_with_torch_defaults(tmp_path: Path, repository: Path) -> None:
    """T05: tensors and plain types only; nothing in the source switches weights_only off."""
    Checkpoints(tmp_path).save(state(1))
    assert torch.load(tmp_path / "last.pt")["epoch"] == 1
    sources = [path.read_text() for path in (repository / "src").rglob("*.py")]
    assert not any("weights_only=False" in text.replace(" ", "") for text in sources)


@pytest.mark.parametrize(
    "damage", [b"", b"hi\n", b"PK\x03\x04 half a file", b"<html>not found</html>", b"\x80\x02."]
)
def test_falls_back_to_the_previous_one_and_says_so(tmp_path: Path, damage: bytes) -> None:
    """T06: a truncated or foreign last.pt."""
    checkpoints, said = Checkpoints(tmp_path), []
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").write_bytes(damage)
    loaded = checkpoints.load(said.append)
    assert loaded is not None
    assert loaded["epoch"] == 1
    assert "last.pt" in said[0]
    assert "epoch 1" in said[0]


def test_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    """T06: cut in the middle, as a full disk without our care would leave it."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    whole = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").write_bytes(whole[: len(whole) // 2])
    loaded = checkpoints.load(lambda message: None)
    assert loaded is not None
    assert loaded["epoch"] == 1


def test_no_loadable_checkpoint_is_an_error(tmp_path: Path) -> None:
    for name in ("last.pt", "previous.pt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InputError, match=r"no checkpoint of this run can be loaded(?s:.*)previous\.pt"):
        Checkpoints(tmp_path).load(lambda message: None)
    with pytest.raises(InputError, match="there is no checkpoint in"):
        load_weights(tmp_path / "elsewhere", lambda message: None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left"),
        (RuntimeError("enforce fail at inline_container.cc: unexpected pos 64"), "is the disk full"),
    ],
)
def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """T06: the write fails in the middle, as the system or torch's own writer says it; what was there still loads."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1))

    def full(content: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match=rf"last\.pt.*{words}"):
        checkpoints.save(state(2))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    loaded = checkpoints.load(lambda message: None)
    assert loaded is not None
    assert loaded["epoch"] == 1


def test_rng_state_round_trip() -> None:
    import random

    import numpy as np

    saved = rng_state()
    first = (torch.rand(3).tolist(), np.random.rand(), random.random())  # noqa: NPY002
    set_rng_state(saved)
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == first  # noqa: NPY002


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """T06: torch does not check what it loads; a weight that rotted on disk must not be trained further."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    content = bytearray((tmp_path / "last.pt").read_bytes())
    weight = content.index(torch.full((3,), 2.0).numpy().tobytes())
    content[weight + 3] ^= 1
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").write_bytes(content)
    said: list[str] = []
    loaded = checkpoints.load(said.append)
    assert loaded is not None
    assert loaded["epoch"] == 1
    assert "not what was written" in said[0]


def test_the_checkpoint_of_another_run_is_rejected(tmp_path: Path) -> None:
    Checkpoints(tmp_path, "one").save(state(1))
    with pytest.raises(InputError, match="not written by this run"):
        Checkpoints(tmp_path, "other").load(lambda message: None)
    assert load_weights(tmp_path, lambda message: None)["w"].tolist() == [1.0, 1.0, 1.0]
