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
        self._zeroed: dict[Hashable, tuple[int, ...]] = {}
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
            self._zeroed.pop(name, None)
        return flat[:size].view(shape)

    def zeroed(self, name: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a tensor that was zero when it was first asked for in this shape.

        Whoever uses it writes to the same places every time, and finds zeros in all others.
        """
        before = self._flat.get(name)
        tensor = self.get(name, shape, like)
        if before is not self._flat[name] or self._zeroed.get(name) != shape:
            tensor.zero_()
            self._zeroed[name] = shape
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"_flat": {}, "_zeroed": {}, "_kept": {}}
