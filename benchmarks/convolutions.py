"""Times of the convolutions, layer by layer: SGD's weight gradients are sums, ours are one per sample.

For every shape of convolution in a network, the library's own summed weight gradient is timed together with each
way of forming the gradients of single samples and with the Gram product of the block. No engine built on these
kernels is faster than a step of SGD in which the fastest of them replaces the sum; everything else in a step, from
Python to the copies between layers, is left out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.problem import Problem
from benchmarks.timing import interleaved
from gramgn.optim.stream import PATHS, Buffers, Memory, Products, applicable, geometry_of, static_choice

SUMMED, GRAM = "summed", "Gram"
ROUNDS = 5


@dataclass(frozen=True)
class Convolution:
    """Seconds of the products of one shape of convolution.

    Attributes:
        shape: Channels and filters, kernel, plane, in words.
        count: Number of layers with this shape.
        seconds: Median seconds of one layer by kernel: `"summed"`, `"Gram"`, and the names of paths.
        chosen: The path that the engine takes.
    """

    shape: str
    count: int
    seconds: Mapping[str, float]
    chosen: str

    @property
    def fastest(self) -> str:
        """The fastest path."""
        return min(
            (name for name in self.seconds if name not in (SUMMED, GRAM)), key=self.seconds.__getitem__
        )

    def beyond_sgd(self, path: str) -> float:
        """Return seconds of all layers of this shape by `path`, with the Gram product, less SGD's."""
        return self.count * (self.seconds[path] + self.seconds[GRAM] - self.seconds[SUMMED])


def least_ratio(layers: Iterable[Convolution], sgd_s: float) -> float:
    """Return the least ratio to a step of SGD of `sgd_s` seconds that the kernels allow."""
    return 1 + sum(each.beyond_sgd(each.fastest) for each in layers) / sgd_s


def time_convolutions(problem: Problem, channels_last: bool, rounds: int = ROUNDS) -> list[Convolution]:
    """Time the kernels of each shape of convolution in the network of a problem, in interleaved rounds."""
    model, x = problem.copied(channels_last)
    layers: dict[Any, tuple[nn.Conv2d, Tensor, Tensor]] = {}
    counts: Counter[Any] = Counter()

    def note(layer: nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        key = (tuple(inputs[0].shape), tuple(layer.weight.shape), layer.stride, layer.padding)
        layers.setdefault(key, (layer, inputs[0].clone(), output.clone()))
        counts[key] += 1

    handles = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [_timed(*layers[key], counts[key], rounds) for key in layers]


def _timed(conv: nn.Conv2d, x: Tensor, grad: Tensor, count: int, rounds: int) -> Convolution:
    padding = conv.padding
    assert isinstance(padding, tuple)
    geometry = geometry_of(conv)
    names = applicable(geometry, x, grad, padding)
    buffers, products = Buffers(), Products()
    # The block's memory is reused from call to call, as in the engine.
    scratch = Memory(
        buffers, lambda parts, size, like: buffers.get("J", (parts, len(x), size), like), products
    )
    chosen = static_choice(names, geometry, x, grad, products.backend)
    block = PATHS[chosen](geometry, x, grad, padding, scratch).rows.clone()

    def summed() -> None:
        torch.ops.aten.convolution_backward(
            grad,
            x,
            conv.weight.detach(),
            None,
            conv.stride,
            padding,
            conv.dilation,
            False,
            [0, 0],
            conv.groups,
            [False, True, False],
        )

    steps: dict[str, Any] = {SUMMED: summed, GRAM: lambda: products.gram(block)}
    for name in names:
        steps[name] = lambda path=PATHS[name]: path(geometry, x, grad, padding, scratch)
    with torch.no_grad():
        seconds = interleaved(steps, x.device, rounds)
    C, F, (height, width) = conv.in_channels, conv.out_channels, conv.kernel_size
    stride = "" if max(conv.stride) == 1 else f", stride {conv.stride[0]}"
    shape = f"{C}->{F}, {height}x{width}{stride}, {grad.shape[2]}x{grad.shape[3]}"
    return Convolution(shape, count, {name: statistics.median(s) for name, s in seconds.items()}, chosen)
