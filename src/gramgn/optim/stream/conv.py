"""Per-sample weight gradients of convolutions: several ways to compute them, and which one is chosen.

Every path is correct wherever `applicable` lists it; paths differ in speed only:

- kernel: the compiled kernel, straight from channels-last memory. Covers two-dimensional planes and, as planes of one
  row, one-dimensional ones, in float32 on a CPU.
- grouped: the library's own weight gradient, with some samples at a time as groups. Covers all shapes.
- single: the library's own weight gradient, called once per sample. Covers all shapes.
- columns: patches of a few samples at a time (about 2 MB), multiplied by the output gradient. Covers strides.
- pointwise: one matrix product per sample for kernels of a single place, without copies.
- strips: for stride 1 and an output plane of the input's size. For each pixel, the pixels covered by one row of
  the kernel are adjacent in memory if channels come last, and each kernel row selects a range of the plane's
  rows. A 3x3 kernel therefore needs a third of the copies that columns make.

b samples, C input channels, F filters, H x W pixels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from gramgn.optim.kernels import Kernels, serves
from gramgn.optim.stream.blocks import Block, Layout, LinearFactors, Memory, as_block
from gramgn.optim.stream.products import BLAS

GROUPED_BYTES, COLUMNS_BYTES, STRIPS_BYTES = 4 * 2**20, 2 * 2**20, 24 * 2**20
LEAST_SAMPLES = 4
"""Minimum number of samples per batched product; a product of one sample does not use several threads well."""

FEW_CHANNELS, FEW_PLACES = 4, 9
"""Up to this number of input channels, the library's grouped convolution is slow; up to this number of places in the
kernel, columns are faster than one call per sample."""

LEAST_PLACES, MANY_PLACES, LARGE_SAMPLE = 64, 1024, 2**15
"""Where only oneDNN is fast: number of output places below which matrix products are faster than convolutions, and
number of output places and size of a sample's input from which one call per sample is the fastest for channels last."""

TRIALS = 3
"""Number of runs per path when probing; the fastest counts."""


class Geometry(NamedTuple):
    """What torch's forward reads from a convolution in this call; attributes may change after construction."""

    weight: Tensor
    kernel_size: tuple[int, ...]  # of the weight, as in torch's forward, and not the module's attribute
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def geometry_of(conv: _ConvNd) -> Geometry:
    """Return the geometry of a convolution."""
    size = tuple(conv.weight.shape[2:])
    stride, dilation = (by_dimension(value, len(size)) for value in (conv.stride, conv.dilation))
    return Geometry(conv.weight, size, stride, dilation, conv.groups)


def by_dimension(value: Any, num: int) -> tuple[int, ...]:
    """Return a size by dimension, where torch also takes one number for all of them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num if len(values) == 1 else values


def padding_of(conv: _ConvNd) -> list[int]:
    """Return what torch's forward pads before and after each dimension, from the last one to the first."""
    # Only other modes than zeros pad by what was stored at construction.
    if conv.padding_mode != "zeros":
        return list(conv._reversed_padding_repeated_twice)
    size, _, dilation = geometry_of(conv)[1:4]
    if conv.padding == "same":
        totals = [d * (n - 1) for n, d in zip(size, dilation, strict=True)]
        return [part for total in reversed(totals) for part in (total // 2, total - total // 2)]
    same = by_dimension(0 if conv.padding == "valid" else conv.padding, len(size))
    return [amount for amount in reversed(same) for _ in range(2)]


Path = Callable[[Geometry, Tensor, Tensor, tuple[int, ...], Memory], Block]


def grouped(conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block as the weight gradient of convolutions with one group per sample.

    A CPU takes a few samples at a time, so that what the library copies into its own format stays in the cache.
    """
    b, size = len(x), conv.weight.numel()
    sample_bytes = (x[0].numel() + grad[0].numel()) * x.element_size()

    def of(start: int, stop: int) -> Tensor:
        n = stop - start
        # Only the shape of the weight matters.
        weight = grad.new_empty(1).expand(n * conv.weight.shape[0], *conv.weight.shape[1:])
        D, X = (t[start:stop].contiguous().view(1, -1, *t.shape[2:]) for t in (grad, x))
        return _weight_gradient(conv, D, X, weight, padding, n * conv.groups).view(n, *conv.weight.shape)

    # A block larger than what it is formed from is not copied together.
    if x.device.type != "cpu" or size * x.element_size() > sample_bytes:
        return as_block(of(0, b))
    rows = memory.rows(1, size, x)
    step = _at_a_time(b, GROUPED_BYTES, sample_bytes)
    for start in range(0, b, step):
        stop = min(start + step, b)
        rows[0, start:stop].view(-1, *conv.weight.shape).copy_(of(start, stop))
    return Block(rows, Layout(tuple(conv.weight.shape), tuple(range(conv.weight.ndim))))


def single(conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block as one weight gradient per sample, in the memory format of the inputs."""
    shape, kept = conv.weight.shape, _is_channels_last(x)
    weight = grad.new_empty(shape).contiguous(
        memory_format=torch.channels_last if kept else torch.contiguous_format
    )
    rows = memory.rows(1, weight.numel(), x)
    order = (0, 2, 3, 1) if kept else tuple(range(x.ndim))
    places = rows[0].view(len(x), *(shape[i] for i in order)).unbind()
    for place, of_sample, grad_of_sample in zip(places, x.split(1), grad.split(1), strict=True):
        gradient = _weight_gradient(conv, grad_of_sample, of_sample, weight, padding, conv.groups)
        place.copy_(gradient.permute(order))
    inverse = tuple(sorted(range(x.ndim), key=order.__getitem__))
    return Block(rows, Layout(tuple(shape[i] for i in order), inverse))


def kernel(conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block by the compiled kernel, which takes a convolution of a line as one of a plane of one row."""
    kernels, line = memory.products.kernels, x.ndim == 3
    assert kernels is not None
    rows = memory.rows(1, conv.weight.numel(), x)
    kernels.conv_weight(
        x.unsqueeze(2) if line else x,
        grad.unsqueeze(2) if line else grad,
        rows[0],
        kernel_size=_of_plane(conv.kernel_size, 1),
        stride=_of_plane(conv.stride, 1),
        padding=_of_plane(padding, 0),
        dilation=_of_plane(conv.dilation, 1),
        groups=conv.groups,
    )
    F, C, *places = conv.weight.shape
    num = len(places)
    return Block(rows, Layout((*places, C, F), (num + 1, num, *range(num))))


def _of_plane(size: tuple[int, ...], first: int) -> tuple[int, int]:
    """Return a size along (H, W), where that of a line has `first` along H."""
    height, width = size if len(size) == 2 else (first, *size)
    return height, width


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _weight_gradient(
    conv: Geometry, grad: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, ...], groups: int
) -> Tensor:
    """Return the library's gradient of the weight, summed over the samples of x."""
    nothing = [0] * len(conv.kernel_size)
    wanted = [False, True, False]
    gradients = torch.ops.aten.convolution_backward(
        grad, x, weight, None, conv.stride, padding, conv.dilation, False, nothing, groups, wanted
    )
    gradient: Tensor = gradients[1]
    return gradient


def columns(conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block as grad [F, plane] times patches [plane, kernel C], a few samples at a time.

    With channels last, patches are copied in long runs and nothing has to be transposed.
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
    patches = _patches(conv, padded, tuple(plane))
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


def _patches(conv: Geometry, padded: Tensor, plane: tuple[int, ...]) -> Tensor:
    """Return the patches [n, *plane, *kernel, C] of padded pixels [n, H, W, C], a view."""
    to_sample, to_row, to_column, to_channel = padded.stride()
    along = [step * n for step, n in zip((to_row, to_column), conv.stride, strict=True)]
    within = [step * n for step, n in zip((to_row, to_column), conv.dilation, strict=True)]
    sizes = (len(padded), *plane, *conv.kernel_size, padded.shape[3])
    return padded.as_strided(sizes, (to_sample, *along, *within, to_channel), padded.storage_offset())


def patch_factors(
    module: _ConvNd, x: Tensor, grad: Tensor, weight: str | None, bias: str | None
) -> LinearFactors:
    """Return the block of a plane's convolution as that of a linear layer with patches for inputs."""
    conv = geometry_of(module)
    x, (height, width) = padded_input(module, x.to(grad.dtype))
    pixels, D = (t.permute(0, 2, 3, 1) for t in (x, grad))
    padded = functional.pad(pixels, (0, 0, width, width, height, height)).contiguous()
    b, *plane, F = D.shape
    A = _patches(conv, padded, tuple(plane)).reshape(b, math.prod(plane), -1)
    layout = Layout((F, *conv.kernel_size, x.shape[1]), (0, 3, 1, 2))
    return LinearFactors(A, D.reshape(b, 1, -1, F), weight, bias, layout)


def pointwise(conv: Geometry, x: Tensor, grad: Tensor, _: tuple[int, ...], memory: Memory) -> Block:
    """Return the block of a kernel of one place as grad [F, plane] times x [plane, C]."""
    b, C, F = *x.shape[:2], grad.shape[1]
    rows = memory.rows(1, F * C, x)
    X, D = (t.movedim(1, -1).reshape(b, -1, t.shape[1]) for t in (x, grad))
    torch.bmm(D.transpose(1, 2), X, out=rows[0].view(b, F, C))
    return Block(rows, Layout((F, C, *conv.kernel_size), tuple(range(x.ndim))))


def strips(conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory) -> Block:
    """Return the block as one product per kernel row."""
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
    """Return the number of samples per batched product, chosen so that all batches have about the same size."""
    most = max(LEAST_SAMPLES, limit_bytes // sample_bytes)
    return math.ceil(num_samples / math.ceil(num_samples / most))


def _fill_strip(strip: Tensor, pixels: Tensor, padding: int) -> None:
    """Write the neighbours of each pixel of [n, H, W, C] into [n, H, W, width, C], with zeros outside the plane."""
    n, H, W, width, C = strip.shape
    last = W - (width - 1 - padding)
    if padding < last:
        # Overlapping runs of width * C numbers.
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
    """Return the places in 0 to `size` whose shifted place is in that range too, and these shifted places."""
    shift = max(-size, min(size, shift))
    return slice(max(0, -shift), size - max(0, shift)), slice(max(0, shift), size - max(0, -shift))


PATHS: dict[str, Path] = {
    "kernel": kernel,
    "grouped": grouped,
    "single": single,
    "columns": columns,
    "pointwise": pointwise,
    "strips": strips,
}
CONV_PATHS = ("static", "probe", *PATHS)
"""The values of the option `conv_path`."""


def padded_input(conv: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return x, padded where the kernels cannot pad by themselves, and the zero padding that is left to them."""
    amount, mode = padding_of(conv), conv.padding_mode
    if mode == "zeros" and amount[::2] == amount[1::2]:
        return x, tuple(reversed(amount[::2]))
    padded = functional.pad(x, amount, mode="constant" if mode == "zeros" else mode) if any(amount) else x
    return padded, (0,) * (x.ndim - 2)


def applicable(
    conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], kernels: Kernels | None = None
) -> list[str]:
    """Return the names of the paths that are correct for a convolution of x with the given zero padding."""
    names = ["grouped", "single"]
    if kernels is not None and x.ndim <= 4 and serves(x, grad):
        names.append("kernel")
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


def static_choice(names: list[str], conv: Geometry, x: Tensor, grad: Tensor, backend: str) -> str:
    """Return one of the applicable paths by shape and processor, so that all runs use the same kernels.

    The rules reflect timings for the shapes of ResNet-32 and ResNet-18 on two processors with AVX-512, one whose matrix
    products use it (`backend` is `"blas"`; an Intel Xeon) and one on which only oneDNN does (`"onednn"`; an AMD EPYC,
    Zen 5). `conv_path="probe"` measures on the machine at hand. For CUDA the first rule follows from the memory traffic
    of each path and was not measured.
    """
    # The kernel reads channels-last memory; what it would gain for a kernel of one place, the copy would lose.
    if "kernel" in names and (_is_channels_last(x) or "pointwise" not in names):
        return "kernel"
    if "pointwise" in names:
        return "pointwise"
    few_channels = x.shape[1] <= FEW_CHANNELS
    if backend == BLAS or x.device.type != "cpu":
        if "strips" in names:
            return "strips"
        return "columns" if "columns" in names and (few_channels or max(conv.stride) > 1) else "grouped"
    if "columns" not in names:
        return "grouped"
    kept = _is_channels_last(x)
    if few_channels:
        return "columns" if kept and math.prod(conv.kernel_size) <= FEW_PLACES else "single"
    num_places = grad[0, 0].numel()
    if num_places < LEAST_PLACES or math.prod(conv.kernel_size) == 1:
        return "strips" if "strips" in names else "columns"
    return "single" if kept and num_places >= MANY_PLACES and x[0].numel() >= LARGE_SAMPLE else "grouped"


class ConvPaths:
    """Chooses the path by which the block of a convolution's weight is formed.

    Args:
        policy: `"static"` chooses by shape, `"probe"` times all applicable paths when a shape is first seen and
            chooses the fastest, and the name of a path selects it wherever it applies.

    Attributes:
        probed: The fastest path by shape. Part of the optimizer's state, so that a resumed run uses the same
            kernels.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.probed: dict[str, str] = {}

    def form(
        self, conv: Geometry, x: Tensor, grad: Tensor, padding: tuple[int, ...], memory: Memory
    ) -> Block:
        """Return the block of the weight."""
        names = applicable(conv, x, grad, padding, memory.products.kernels)

        def run(name: str) -> Block:
            return PATHS[name](conv, x, grad, padding, memory)

        if self.policy in names:
            return run(self.policy)
        if self.policy != "probe" or len(names) == 1:
            return run(static_choice(names, conv, x, grad, memory.products.backend))
        shape = f"{list(x.shape)} {list(conv.weight.shape)} stride {conv.stride} {x.stride()} {x.dtype} {x.device}"
        if self.probed.get(shape) not in names:
            self.probed[shape] = min(names, key=lambda name: _seconds(lambda: run(name), x.device))
        return run(self.probed[shape])


def _seconds(run: Callable[[], Block], device: torch.device) -> float:
    """Return the seconds of the fastest of several runs."""
    times = []
    for _ in range(TRIALS):
        _synchronise(device)
        start = time.perf_counter()
        run()
        _synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
