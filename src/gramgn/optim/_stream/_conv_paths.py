"""Ways of forming the per-sample weight gradients of a convolution, and which is taken.

Each is right where ``applies`` says so; they differ in speed alone:

- grouped: the library's own weight gradient, with the samples as groups. For all shapes.
- columns: patches of a few samples at a time (about 2 MB), times the output's gradient. For strides.
- pointwise: kernels of one place: one matrix product a sample, nothing copied.
- strips: for stride 1 on a plane of the same size: to each pixel the pixels that one kernel row covers, which
  lie side by side with the channels last. Kernel rows are ranges of the plane's rows, so that a third of the
  columns' copying is enough for a 3x3 kernel.

b samples, C input channels, F filters, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from gramgn.optim._stream._blocks import Block, Layout, as_block
from gramgn.optim._stream._buffers import Buffers

COLUMNS_BYTES, STRIPS_BYTES = 2 * 2**20, 24 * 2**20
LEAST_SAMPLES = 4
"""At a time: a product of one sample's matrices alone does not use several threads well."""


class Memory(Protocol):
    """Where a path may write."""

    @property
    def buffers(self) -> Buffers:
        """Scratch memory."""

    def rows(self, parts: int, size: int, like: Tensor) -> Tensor:
        """Return uninitialised memory [parts, b, size] for the block."""


Path = Callable[[_ConvNd, Tensor, Tensor, tuple[int, ...], Memory], Block]


def grouped(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], _: Memory) -> Block:
    """Return the block by the weight gradient of a convolution with a group for each sample."""
    b = len(x)
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
        [0] * len(conv.kernel_size),
        b * conv.groups,
        [False, True, False],
    )[1]
    return as_block(block.view(b, *conv.weight.shape))


def columns(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block as grad [F, plane] times patches [plane, kernel C], some samples at a time.

    With the channels last, the patches are copied in long runs, and no layout has to be turned round.
    """
    pixels = x.permute(0, 2, 3, 1)
    (b, *shape, C), (F, *plane), kernel = pixels.shape, grad.shape[1:], conv.kernel_size
    num_places, size = math.prod(plane), math.prod(kernel) * C
    step = _at_a_time(b, COLUMNS_BYTES, size * num_places * x.element_size())
    padded = memory.buffers.get(
        "padded", (step, *(n + 2 * p for n, p in zip(shape, padding, strict=True)), C), x
    )
    inner = padded[(slice(None), *(slice(p, p + n) for n, p in zip(shape, padding, strict=True)))]
    padded.zero_()
    to_sample, to_row, to_column, to_channel = padded.stride()
    along = [step * n for step, n in zip((to_row, to_column), conv.stride, strict=True)]
    within = [step * n for step, n in zip((to_row, to_column), conv.dilation, strict=True)]
    patches = padded.as_strided((step, *plane, *kernel, C), (to_sample, *along, *within, to_channel))
    copied = memory.buffers.get("columns", (step, num_places, size), x)
    D = grad.permute(0, 2, 3, 1).reshape(b, num_places, F).transpose(1, 2)
    rows = memory.rows(1, F * size, x)
    block = rows[0].view(b, F, size)
    for start in range(0, b, step):
        n = min(step, b - start)
        inner[:n] = pixels[start : start + n]
        copied[:n].view(n, *plane, *kernel, C).copy_(patches[:n])
        torch.bmm(D[start : start + n], copied[:n], out=block[start : start + n])
    return Block(rows, Layout((F, *kernel, C), (0, 3, 1, 2)))


def pointwise(conv: _ConvNd, x: Tensor, grad: Tensor, _: tuple[int, ...], memory: Memory) -> Block:
    """Return the block of a kernel of one place as grad [F, plane] times x [plane, C]."""
    b, C, F = *x.shape[:2], grad.shape[1]
    rows = memory.rows(1, F * C, x)
    X, D = (t.movedim(1, -1).reshape(b, -1, t.shape[1]) for t in (x, grad))
    torch.bmm(D.transpose(1, 2), X, out=rows[0].view(b, F, C))
    return Block(rows, Layout((F, C, *conv.kernel_size), tuple(range(x.ndim))))


def strips(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block as one product for each kernel row."""
    (b, C, H, W), F, (height, width) = x.shape, grad.shape[1], conv.kernel_size
    pixels, D = (t.permute(0, 2, 3, 1).contiguous() for t in (x, grad))
    D = D.view(b, H * W, F)
    rows = memory.rows(height, F * width * C, x)
    step = _at_a_time(b, STRIPS_BYTES, H * W * width * C * x.element_size())
    strip = memory.buffers.get("strips", (step, H, W, width, C), x)
    for start in range(0, b, step):
        n = min(step, b - start)
        _fill_strip(strip[:n], pixels[start : start + n], padding[1])
        X = strip[:n].view(n, H * W, width * C)
        for i in range(height):
            to, of = _overlap((i - padding[0]) * W, H * W)
            block = rows[i, start : start + n].view(n, F, width * C)
            torch.bmm(D[start : start + n, to].transpose(1, 2), X[:, of], out=block)
    return Block(rows, Layout((height, F, width, C), (1, 3, 0, 2)))


def _at_a_time(num_samples: int, limit_bytes: int, sample_bytes: int) -> int:
    """Return how many samples are taken at a time, so that the last ones are about as many as the others."""
    most = max(LEAST_SAMPLES, limit_bytes // sample_bytes)
    return math.ceil(num_samples / math.ceil(num_samples / most))


def _fill_strip(strip: Tensor, pixels: Tensor, padding: int) -> None:
    """Write the neighbours of each pixel of [n, H, W, C] into [n, H, W, width, C]; it is zero beyond the plane."""
    n, H, W, width, C = strip.shape
    last = W - (width - 1 - padding)
    if padding < last:
        # Overlapping runs of width C numbers each.
        windows = pixels.as_strided(
            (n, H, last - padding, width, C), (H * W * C, W * C, C, C, 1), pixels.storage_offset()
        )
        strip[:, :, padding:last] = windows
    for column in (*range(min(padding, W)), *range(max(last, padding), W)):
        shift = column - padding
        of = slice(max(0, shift), min(W, shift + width))
        strip[:, :, column].zero_()
        strip[:, :, column, of.start - shift : of.stop - shift] = pixels[:, :, of]


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Return the places that meet a place within 0 to ``size`` when shifted, and the places they meet."""
    shift = max(-size, min(size, shift))
    return slice(max(0, -shift), size - max(0, shift)), slice(max(0, shift), size - max(0, -shift))


PATHS: dict[str, Path] = {
    "grouped": grouped,
    "columns": columns,
    "pointwise": pointwise,
    "strips": strips,
}


def applicable(conv: _ConvNd, x: Tensor, grad: Tensor, padding: tuple[int, ...]) -> list[str]:
    """Return the names of the paths that are right for a convolution, after padding was left to do."""
    names = ["grouped"]
    if conv.groups > 1:
        return names
    plain = set(conv.stride) == {1} and set(conv.dilation) == {1}
    if len(conv.kernel_size) == 2:
        names.append("columns")
        if plain and grad.shape[2:] == x.shape[2:]:
            names.append("strips")
    if plain and math.prod(conv.kernel_size) == 1 and not any(padding):
        names.append("pointwise")
    return names


def static_choice(names: list[str], conv: _ConvNd, device: torch.device) -> str:
    """Return one of the names by shape and device alone, so that two runs take the same kernels.

    On the CPU as timed on two cores with AVX-512 for the shapes of ResNet-32 (``conv_path="probe"`` times them
    anew); the choice for CUDA follows from what each path moves, and was not measured.
    """
    if "pointwise" in names:
        return "pointwise"
    if "strips" in names:
        return "strips"
    few_or_strided = conv.in_channels <= FEW_CHANNELS or max(conv.stride) > 1
    return "columns" if "columns" in names and few_or_strided else "grouped"


FEW_CHANNELS = 4
"""So few that the library's grouped convolution is slow."""
