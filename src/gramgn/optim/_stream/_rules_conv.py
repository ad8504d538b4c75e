"""The rule for convolutions of one to three dimensions.

Two ways, chosen by shape alone so that two runs use the same kernels:

- grouped: the library's own weight gradient, with the samples as groups. As fast as the gradient of the whole
  batch on large planes.
- columns: patches of a few samples at a time (about 2 MB), times the output's gradient. Faster for few input
  channels and for small planes.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from gramgn.optim._stream._buffers import Buffers

COLUMNS_BYTES = 2 * 2**20
SMALL_PLANE = 8 * 8
FEW_CHANNELS = 4


def blocks(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], buffers: Buffers
) -> dict[str, Tensor]:
    """Per-sample gradients of a convolution of x [b, C, *plane] with gradient [b, O, *out_plane]."""
    conv = cast(_ConvNd, module)
    result = {}
    if "bias" in names:
        result["bias"] = grad.flatten(2).sum(dim=2)
    if "weight" in names:
        x, padding = _padded(conv, x)
        form = _columns if _prefers_columns(conv, grad) else _grouped
        result["weight"] = form(conv, x, grad, padding, buffers)
    return result


def _padded(conv: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return x, padded here where the convolution cannot pad by itself, and the padding left to do."""
    if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
        return x, tuple(conv.padding)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    amount = conv._reversed_padding_repeated_twice
    return (F.pad(x, amount, mode=mode) if any(amount) else x), (0,) * len(conv.kernel_size)


def _prefers_columns(conv: _ConvNd, grad: Tensor) -> bool:
    """The static rule."""
    few = conv.in_channels <= FEW_CHANNELS or math.prod(grad.shape[2:]) <= SMALL_PLANE
    return few and conv.groups == 1 and len(conv.kernel_size) == 2 and grad.device.type == "cpu"


def _grouped(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], _: Buffers) -> Tensor:
    """Return [b, *weight.shape] by the weight gradient of a convolution with a group for each sample."""
    b, dims = len(x), len(conv.kernel_size)
    # Only the shape of the weight matters.
    weight = grad.new_empty(1).expand(b * conv.weight.shape[0], *conv.weight.shape[1:])
    block = torch.ops.aten.convolution_backward(
        grad.reshape(1, -1, *grad.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,
        conv.stride,
        padding,
        conv.dilation,
        False,
        [0] * dims,
        b * conv.groups,
        [False, True, False],
    )[1]
    return block.view(b, *conv.weight.shape)


def _columns(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], buffers: Buffers) -> Tensor:
    """Return [b, *weight.shape] as grad [O, plane] times patches [plane, C kernel], some samples at a time."""
    if any(padding):
        x = F.pad(x, [p for size in reversed(padding) for p in (size, size)])
    b, (C, O), plane = len(x), (x.shape[1], grad.shape[1]), grad.shape[2:]
    patch, size = (C, *conv.kernel_size), C * math.prod(conv.kernel_size)
    spread = (conv.dilation[i] * x.stride(i + 2) for i in range(2))
    strides = (*x.stride()[:2], *spread, *(conv.stride[i] * x.stride(i + 2) for i in range(2)))
    patches = x.as_strided((b, *patch, *plane), strides)
    step = max(1, min(b, COLUMNS_BYTES // (size * math.prod(plane) * x.element_size())))
    columns = buffers.get("columns", (step, *patch, *plane), x)
    D = grad.reshape(b, O, -1)
    block = D.new_empty(b, O, size)
    for start in range(0, b, step):
        n = min(step, b - start)
        columns[:n].copy_(patches[start : start + n])
        torch.bmm(
            D[start : start + n],
            columns[:n].view(n, size, -1).transpose(1, 2),
            out=block[start : start + n],
        )
    return block.view(b, *conv.weight.shape)
