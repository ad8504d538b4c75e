"""Memory that is used again in the next step: fresh memory costs more than what is written into it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Buffers:
    """Flat tensors by name, grown when a larger one is asked for. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._flat: dict[Hashable, Tensor] = {}
        self._kept: dict[str, Tensor] = {}

    def keep(self, blocks: Mapping[str, Tensor]) -> None:
        """Hold the blocks of a finished step until the next step forms its own."""
        self._kept = dict(blocks)

    def free(self, names: Iterable[str]) -> None:
        """Let the last step's blocks go right before new ones of the same sizes are made in their place."""
        for name in names:
            self._kept.pop(name, None)

    def get(self, name: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised contiguous tensor; the one returned before by this name is overwritten.

        Args:
            name: Who uses it.
            shape: The shape wanted.
            like: Gives dtype and device.
        """
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != like.dtype or flat.device != like.device:
            flat = self._flat[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return flat[:size].view(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"_flat": {}, "_kept": {}}
