"""Per-sample weight gradients of convolutions by the compiled kernels, against float64."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from gramgn.optim.kernels import available, load

# Channels, (H, W), filters, kernel; then stride, padding, dilation, groups.
SHAPES = {
    "3x3": (16, (12, 9), 32, (3, 3), 1, 1),
    "3x3, many places": (16, (40, 40), 16, (3, 3), 1, 1),
    "3x3, medium": (32, (16, 16), 48, (3, 3), 1, 1),
    "3x3, few places": (64, (8, 8), 64, (3, 3), 1, 1),
    "3x3, stride 2": (16, (13, 15), 32, (3, 3), 2, 1),
    "3x3, no padding": (32, (9, 9), 48, (3, 3), 1, 0),
    "3x3, wide padding": (16, (6, 6), 16, (3, 3), 1, 2),
    "3x3, plane of one place": (32, (1, 1), 16, (3, 3), 1, 1),
    "stem": (3, (16, 16), 16, (3, 3), 1, 1),
    "stem, 7x7, stride 2": (3, (19, 17), 64, (7, 7), 2, 3),
    "stem, one channel": (1, (12, 12), 17, (5, 5), 1, 2),
    "patches": (3, (16, 16), 48, (4, 4), 4, 0),
    "1x1": (33, (7, 5), 65, (1, 1), 1, 0),
    "1x1, stride 2": (32, (7, 9), 64, (1, 1), 2, 0),
    "1x1, plane of one row": (5, (1, 7), 3, (1, 1), 1, 0),
    "one filter": (64, (9, 9), 1, (3, 3), 1, 1),
    "5x5": (17, (11, 10), 48, (5, 5), 1, 2),
    "even kernel": (16, (9, 8), 24, (2, 4), (1, 2), (1, 2)),
    "kernel as large as the padded plane": (8, (2, 3), 20, (6, 5), 1, (2, 1)),
    "1-d": (16, (1, 50), 16, (1, 5), 1, (0, 2)),
    "1-d, long rows": (3, (1, 1200), 5, (1, 9), (1, 3), (0, 8)),
    "tall": (2, (700, 1), 5, (9, 1), (2, 1), (4, 0)),
    "padding wider than the kernel": (3, (32, 32), 16, (3, 3), 1, 3),
    "padding wider than the kernel, few filters": (1, (64, 64), 4, (3, 3), 1, 4),
    "padding wider than the kernel, even kernel": (3, (40, 35), 8, (2, 2), 1, (2, 4)),
    "padding wider than the kernel, dilated": (2, (70, 20), 5, (2, 3), 1, (5, 1), (2, 1)),
    "dilated": (3, (20, 17), 33, (3, 3), 1, (2, 3), (2, 3)),
    "dilated, stride 2": (16, (20, 17), 16, (3, 3), 2, 2, 2),
    "grouped": (24, (9, 9), 48, (3, 3), 1, 1, 1, 3),
    "grouped, few channels": (32, (9, 9), 32, (3, 3), 2, 1, 1, 8),
    "grouped 1x1": (34, (5, 5), 38, (1, 1), 1, 0, 1, 2),
    "depthwise": (40, (9, 10), 40, (3, 3), 1, 1, 1, 40),
    "depthwise, 7x7": (33, (7, 7), 33, (7, 7), 1, 3, 1, 33),
    "depthwise, two filters each": (24, (11, 11), 48, (3, 3), 2, 1, 1, 24),
    "depthwise, 1-d, dilated": (17, (1, 300), 17, (1, 3), 1, (0, 2), (1, 2), 17),
}

pytestmark = pytest.mark.skipif(not available(), reason="the compiled kernels are not built")


def _pair(n):
    return (n, n) if isinstance(n, int) else n


def _convolution(C, size, F, kernel, stride=1, padding=0, dilation=1, groups=1, b=3):
    """Return inputs and output gradients in channels last, half of them zero, and the convolution's options."""
    names = ("stride", "padding", "dilation")
    options = dict(zip(names, map(_pair, (stride, padding, dilation)), strict=True))
    plane = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, *options.values(), strict=True)
    ]
    x = torch.relu(torch.randn(b, C, *size))
    grad = torch.randn(b, F, *plane) * (torch.rand(b, F, *plane) > 0.5)
    last = torch.channels_last
    return (
        x.contiguous(memory_format=last),
        grad.contiguous(memory_format=last),
        {"kernel_size": kernel, "groups": groups, **options},
    )


def _kernel(form: str, x: Tensor, grad: Tensor, *, winograd: bool = True, **options) -> Tensor:
    """Return the rows of a kernel that were NaN before, from a wider matrix that stays NaN elsewhere."""
    size = (
        options["kernel_size"][0]
        * options["kernel_size"][1]
        * x.shape[1]
        // options["groups"]
        * grad.shape[1]
    )
    wide = torch.full((len(x), size + 7), torch.nan)
    load(form).conv_weight(x, grad, wide[:, 3 : 3 + size], winograd=winograd, **options)
    assert wide[:, :3].isnan().all()
    assert wide[:, 3 + size :].isnan().all()
    return wide[:, 3 : 3 + size]


def _reference(x: Tensor, grad: Tensor, *, kernel_size, groups, **options) -> Tensor:
    weight = (grad.shape[1], x.shape[1] // groups, *kernel_size)
    rows = [
        conv2d_weight(xn[None], weight, dn[None], groups=groups, **options)
        for xn, dn in zip(x.double(), grad.double(), strict=True)
    ]
    return torch.stack(rows).permute(0, 3, 4, 2, 1).flatten(1)


def _error(rows: Tensor, reference: Tensor) -> float:
    return float(((rows - reference).norm(dim=1) / reference.norm(dim=1).clamp_min(1e-3)).max())


@pytest.mark.parametrize("form", available())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_kind_of_convolution(shape, form):
    """Every entry is written, nothing else is, and the error is that of float32 sums."""
    torch.manual_seed(0)
    x, grad, options = _convolution(*shape)
    reference = _reference(x, grad, **options)
    poison = [torch.full((n,), 1e30) for n in range(500, 60_000, 1500)]  # what scratch memory then contains
    del poison
    assert _error(_kernel(form, x, grad, winograd=False, **options), reference) < 1e-6
    assert _error(_kernel(form, x, grad, **options), reference) < 4e-6


def _outlier(x: Tensor, grad: Tensor, size: float) -> None:
    """One place of a large number, where the gradients of all outputs that meet it are zero."""
    x[:, :, 5, 5] = size
    grad[:, :, 4:7, 4:7] = 0


def _half(x: Tensor, grad: Tensor, size: float) -> None:
    """A masked half of the plane, as in images with a number for missing data."""
    x[:, :, :7] = -size
    grad[:, :, :8] = 0


def _channel(x: Tensor, grad: Tensor, size: float) -> None:
    """Likewise in one channel."""
    x[:, 3, 5, 5] = size
    grad[:, :, 4:7, 4:7] = 0


def _filter(x: Tensor, grad: Tensor, size: float) -> None:
    """A large gradient in one filter, where the input is zero."""
    grad[:, 2, 5, 5] = size
    x[:, :, 4:7, 4:7] = 0


@pytest.mark.parametrize("form", available())
@pytest.mark.parametrize("size", [30.0, 1e3, 9999.0, 1e6, 1e15])
@pytest.mark.parametrize("kind", [_outlier, _half, _channel, _filter])
@pytest.mark.parametrize("name", ["3x3", "3x3, many places", "3x3, few places", "3x3, medium"])
def test_outliers_cost_no_digits(name, kind, size, form):
    """Large numbers that meet only zeros leave the error of every sample what it was."""
    torch.manual_seed(5)
    x, grad, options = _convolution(*SHAPES[name])
    kind(x[1:], grad[1:], size)
    rows = _kernel(form, x, grad, **options)
    assert _error(rows, _reference(x, grad, **options)) < 4e-6
    assert torch.equal(rows[1:2], _kernel(form, x[1:2], grad[1:2], **options))


@pytest.mark.parametrize("form", available())
@pytest.mark.parametrize("winograd", [False, True])
@pytest.mark.parametrize("size", [(8, 8), (48, 24)])
def test_results_larger_than_a_cache(size, winograd, form):
    """They are written past the cache."""
    torch.manual_seed(4)
    x, grad, options = _convolution(96, size, 128, (3, 3), 1, 1)
    rows = torch.full((3, 9 * 96 * 128), torch.nan)
    load(form).conv_weight(x, grad, rows, winograd=winograd, **options)
    assert _error(rows, _reference(x, grad, **options)) < 4e-6


@pytest.mark.parametrize("form", available())
def test_random_shapes(form):
    """Odd sizes in all combinations."""
    torch.manual_seed(1)
    draw = random.Random(1)
    for _ in range(150):
        groups, kernel = draw.choice((1, 1, 1, 2, 5)), (draw.randint(1, 5), draw.randint(1, 5))
        padding, dilation = (
            tuple(draw.randint(0, k) for k in kernel),
            (draw.randint(1, 2), draw.randint(1, 2)),
        )
        size = tuple(
            draw.choice((1, 2, 5, 9, 16)) + d * (k - 1) for k, d in zip(kernel, dilation, strict=True)
        )
        C, F = (groups * draw.choice((1, 2, 3, 8, 16, 17, 33)) for _ in "CF")
        shape = (C, size, F, kernel, (draw.randint(1, 3), draw.randint(1, 3)), padding, dilation, groups)
        x, grad, options = _convolution(*shape, b=draw.randint(1, 3))
        assert _error(_kernel(form, x, grad, **options), _reference(x, grad, **options)) < 4e-6, shape


@pytest.mark.parametrize("form", available())
@pytest.mark.parametrize("winograd", [False, True])
@pytest.mark.parametrize("name", ["3x3, many places", "stem", "1x1", "grouped", "depthwise"])
def test_a_sample_depends_on_nothing_else(name, winograd, form):
    """The rows of a sample are the same bits alone and in a batch, in repetitions and with other threads."""
    torch.manual_seed(2)
    x, grad, options = _convolution(*SHAPES[name])
    rows = _kernel(form, x, grad, winograd=winograd, **options)
    threads = torch.get_num_threads()
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        try:
            assert torch.equal(rows, _kernel(form, x, grad, winograd=winograd, **options))
            alone = [
                _kernel(form, x[n : n + 1], grad[n : n + 1], winograd=winograd, **options) for n in range(3)
            ]
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(rows, torch.cat(alone))


@pytest.mark.parametrize("form", available())
def test_values_that_are_not_finite_stay_in_their_sample(form):
    """A sample with an infinite gradient makes no other sample infinite."""
    torch.manual_seed(3)
    for name in ("3x3, many places", "stem", "one filter", "depthwise"):
        x, grad, options = _convolution(*SHAPES[name])
        rows = _kernel(form, x, grad, **options)
        grad[1] = torch.inf
        spoilt = _kernel(form, x, grad, **options)
        assert torch.equal(rows[::2], spoilt[::2])
        assert not spoilt[1].isfinite().all()
