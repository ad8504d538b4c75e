"""The rule for convolutions of one to three dimensions.

Two ways, chosen by shape alone so that two runs use the same kernels:

- grouped: the library's own weight gradient, with the samples as groups. As fast as the gradient of the whole
  batch on large planes.
- columns: patches of a few samples at a time (about 2 MB), times the output's gradient. Faster on CPU for few
  and for many input channels and for strides.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from gramgn.optim._stream._buffers import Buffers
from gramgn.optim._stream._shapes import check_batched

COLUMNS_BYTES = 2 * 2**20
LEAST_SAMPLES = 4
"""At a time: a product of one sample's matrices alone does not use several threads well."""
FEW_CHANNELS, MANY_CHANNELS = 4, 64


def blocks(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], buffers: Buffers
) -> dict[str, Tensor]:
    """Per-sample gradients of a convolution of x [b, C, *plane] with gradient [b, O, *out_plane]."""
    conv = cast(_ConvNd, module)
    check_batched(x, len(conv.kernel_size) + 2)
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
    return (functional.pad(x, amount, mode=mode) if any(amount) else x), (0,) * len(conv.kernel_size)


def _prefers_columns(conv: _ConvNd, grad: Tensor) -> bool:
    """The static rule."""
    if conv.groups > 1 or len(conv.kernel_size) != 2 or grad.device.type != "cpu":
        return False
    few_or_many = not FEW_CHANNELS < conv.in_channels < MANY_CHANNELS
    return few_or_many or max(conv.stride) > 1


def _grouped(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], _: Buffers) -> Tensor:
    """Return [b, *weight.shape] by the weight gradient of a convolution with a group for each sample."""
    b, dims = len(x), len(conv.kernel_size)
    # Only the shape of the weight matters.
    weight = grad.new_empty(1).expand(b * conv.weight.shape[0], *conv.weight.shape[1:])
    block = torch.ops.aten.convolution_backward(
        grad.contiguous().view(1, -1, *grad.shape[2:]),
        x.contiguous().view(1, -1, *x.shape[2:]),
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
    """Return [b, *weight.shape] as grad [O, plane] times patches [plane, kernel C], some samples at a time.

    With the channels last, the patches are copied in long runs, and no layout has to be turned round.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    if any(padding):
        x = functional.pad(x, [p for size in reversed(padding) for p in (size, size)])
    (b, C), (num_out, *plane), kernel = x.shape[:2], grad.shape[1:], conv.kernel_size
    to_sample, to_channel, to_row, to_column = x.stride()
    along = [step * n for step, n in zip((to_row, to_column), conv.stride, strict=True)]
    within = [step * n for step, n in zip((to_row, to_column), conv.dilation, strict=True)]
    patches = x.as_strided((b, *plane, *kernel, C), (to_sample, *along, *within, to_channel))
    num_places, size = math.prod(plane), math.prod(kernel) * C
    step = min(b, max(LEAST_SAMPLES, COLUMNS_BYTES // (size * num_places * x.element_size())))
    columns = buffers.get("columns", (step, num_places, size), x)
    D = _by_channel(grad)
    block = D.new_empty(b, num_out, size)
    for start in range(0, b, step):
        n = min(step, b - start)
        columns[:n].view(n, *plane, *kernel, C).copy_(patches[start : start + n])
        torch.bmm(D[start : start + n], columns[:n], out=block[start : start + n])
    return block.view(b, num_out, *kernel, C).permute(0, 1, 4, 2, 3)


def _by_channel(grad: Tensor) -> Tensor:
    """Return [b, O, places] of a gradient in either memory format, as a view."""
    if grad.is_contiguous(memory_format=torch.channels_last):
        return grad.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)
    return grad.reshape(*grad.shape[:2], -1)
