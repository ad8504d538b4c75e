"""The rule for convolutions of one to three dimensions."""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from gramgn.optim._stream._blocks import Block, Blocks
from gramgn.optim._stream._conv_paths import PATHS, Memory, applicable, static_choice
from gramgn.optim._stream._rule import RuleMemory
from gramgn.optim._stream._shapes import check_batched

CONV_PATHS = ("static", "probe", *PATHS)
TRIALS = 3


class ConvPaths:
    """Chooses the way in which the blocks of convolutions are formed.

    Args:
        policy: ``"static"``: by shape and device. ``"probe"``: the fastest when a shape is first met. Or the
            name of a path, taken where it applies, for tests and comparisons.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.probed: dict[str, str] = {}
        """What was found fastest, by shape; kept with the optimizer's state, so that a resumed run repeats."""

    def form(self, conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
        """Return the block of the weight."""
        names = applicable(conv, x, grad, padding)
        if self.policy in names:
            name = self.policy
        elif self.policy == "probe" and len(names) > 1:
            name = self._probed(names, conv, x, grad, padding, memory)
        else:
            name = static_choice(names, conv, x.device)
        return PATHS[name](conv, x, grad, padding, memory)

    def _probed(
        self,
        names: list[str],
        conv: _ConvNd,
        x: Tensor,
        grad: Tensor,
        padding: tuple[int, ...],
        memory: Memory,
    ) -> str:
        shape = f"{list(x.shape)} {list(conv.weight.shape)} stride {conv.stride} {x.stride()} {x.dtype} {x.device}"
        if self.probed.get(shape) not in names:

            def seconds(name: str) -> float:
                times = []
                for _ in range(TRIALS):
                    _synchronise(x.device)
                    start = time.perf_counter()
                    PATHS[name](conv, x, grad, padding, memory)
                    _synchronise(x.device)
                    times.append(time.perf_counter() - start)
                return min(times)

            self.probed[shape] = min(names, key=seconds)
        return self.probed[shape]


def blocks(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory) -> Blocks:
    """Per-sample gradients of a convolution of x [b, C, *plane] with gradient [b, O, *out_plane]."""
    conv = cast(_ConvNd, module)
    check_batched(x, len(conv.kernel_size) + 2)
    result: dict[str, Tensor | Block] = {}
    if "bias" in names:
        result["bias"] = grad.flatten(2).sum(dim=2)
    if "weight" in names:
        x, padding = _padded(conv, x.to(grad.dtype))
        result["weight"] = memory.conv_paths.form(conv, x, grad, padding, memory.of("weight"))
    return result


def _padded(conv: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return x, padded here where the convolution cannot pad by itself, and the padding left to do."""
    amount = conv._reversed_padding_repeated_twice
    if conv.padding_mode == "zeros":
        # The same on both sides, dimension by dimension from the last.
        if amount[::2] == amount[1::2]:
            return x, tuple(reversed(amount[::2]))
        return functional.pad(x, amount), (0,) * len(conv.kernel_size)
    padded = functional.pad(x, amount, mode=conv.padding_mode) if any(amount) else x
    return padded, (0,) * len(conv.kernel_size)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
