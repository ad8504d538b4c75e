"""Randomness: seeds, the order of the data, and the state that a checkpoint keeps."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch (every device), NumPy and Python. The pipeline itself draws from torch only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's own network may draw from the global generator
    torch.manual_seed(seed)


def epoch_order(num_samples: int, *, seed: int, epoch: int, order: str) -> torch.Tensor:
    """Return the order of the samples in an epoch: a function of its arguments and of nothing else.

    Args:
        num_samples: Samples in the training split.
        seed: The run's seed.
        epoch: Counted from 1.
        order: ``"shuffle"`` or ``"cyclic"`` (the same order, 0 to n - 1, in every epoch).

    Returns:
        Indices ``[num_samples]`` int64 on the CPU.
    """
    if order == "cyclic":
        return torch.arange(num_samples)
    digest = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(num_samples, generator=generator)


def rng_state() -> dict[str, Any]:
    """Return the state of every generator as tensors and plain Python types."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss_next],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every generator back where :func:`rng_state` found it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
