"""Kernels of the streaming engine, against float64 and against autograd."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.optim import Stream
from gramgn.optim.kernels import Kernels, available, load
from gramgn.optim.stream import BACKENDS, PATHS, Buffers, Memory, Products, applicable


@pytest.mark.parametrize(
    ("parts", "n", "size"),
    # Small and large products, with few and with many rows.
    [(1, 3, 7), (3, 5, 8), (1, 40, 7000), (2, 257, 400), (3, 600, 31), (1, 8, 300_001)],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gram_product_of_any_size_is_rows_times_rows(
    parts: int, n: int, size: int, backend: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(parts, n, size, dtype=torch.float64).to(dtype)
    expected = torch.einsum("pis,pjs->ij", rows.double(), rows.double())
    G = Products(backend=backend).gram(rows)
    assert G.dtype == torch.float64
    bound = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    assert (G - expected).abs().max() <= bound * expected.abs().max()


def weight_gradients(layer: nn.Conv2d, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of each sample by itself, by autograd."""
    return torch.stack(
        [torch.autograd.grad(layer(x[i : i + 1]), layer.weight, grad[i : i + 1])[0] for i in range(len(x))]
    )


def formed(
    path: str, layer: nn.Conv2d, x: Tensor, grad: Tensor, buffers: Buffers, kernels: Kernels | None = None
) -> Tensor:
    memory = Memory(buffers, lambda parts, size, like: like.new_empty(parts, len(x), size), Products(kernels))
    with torch.no_grad():
        block = PATHS[path](layer, x, grad, tuple(layer.padding), memory)
    return torch.stack([block.layout.to_param(row.flatten()) for row in block.rows.unbind(1)])


@pytest.mark.parametrize("channels_last", [False, True])
@settings(max_examples=50, deadline=None)
@given(
    b=st.integers(1, 6),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    same=st.booleans(),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    size=st.tuples(st.integers(5, 7), st.integers(5, 8)),
)
def test_every_path_that_applies_to_a_convolution(
    channels_last: bool,
    b: int,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    same: bool,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    size: tuple[int, int],
) -> None:
    """G05: each path at any shape that it covers and in either memory format."""
    torch.manual_seed(0)
    if same:  # strips for odd kernels, and pointwise for 1 x 1
        kernel = (2 * kernel[0] - 1, 2 * kernel[1] - 1)
        stride, dilation, padding = (1, 1), (1, 1), (kernel[0] // 2, kernel[1] // 2)
    layer = nn.Conv2d(*channels, kernel, stride=stride, padding=padding, dilation=dilation).double()
    x = torch.randn(b, channels[0], *size, dtype=torch.float64)
    grad = torch.randn_like(layer(x))
    if channels_last:
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    names = applicable(layer, x, grad, padding)
    assert "strips" in names or not same
    assert ("pointwise" in names) == (kernel == stride == dilation == (1, 1) and padding == (0, 0))
    for name in names:
        torch.testing.assert_close(
            formed(name, layer, x, grad, Buffers()), weight_gradients(layer, x, grad), rtol=1e-11, atol=1e-11
        )


@pytest.mark.parametrize(("path", "b", "C", "size"), [("columns", 33, 8, 16), ("strips", 31, 64, 32)])
def test_many_samples_are_taken_a_few_at_a_time(path: str, b: int, C: int, size: int) -> None:
    """More samples than fit into the scratch memory, with a rest, twice in memory that was written to."""
    torch.manual_seed(0)
    layer = nn.Conv2d(C, 2, 3, padding=1, dtype=torch.float64)
    x = torch.randn(b, C, size, size, dtype=torch.float64)
    grad = torch.randn(b, 2, size, size, dtype=torch.float64)
    expected, buffers = weight_gradients(layer, x, grad), Buffers()
    for _ in range(2):
        torch.testing.assert_close(formed(path, layer, x, grad, buffers), expected, rtol=1e-11, atol=1e-11)
        for name in ("strips", "padded", "columns"):
            buffers.get(name, (1,), x).fill_(float("nan"))


@pytest.mark.parametrize("form", available())
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.Conv2d(6, 6, (5, 3), padding=(2, 0), groups=6),
        nn.Conv2d(4, 10, (1, 2), stride=(2, 1), dilation=2, groups=2),
    ],
)
def test_the_kernel_path_forms_the_gradients_of_each_sample(
    form: str, channels_last: bool, layer: nn.Conv2d
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, layer.in_channels, 9, 11)
    grad = torch.randn_like(layer(x))
    if channels_last:
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    expected = weight_gradients(copy.deepcopy(layer).double(), x.double(), grad.double())
    assert "kernel" in applicable(layer, x, grad, tuple(layer.padding), load(form))
    found = formed("kernel", layer, x, grad, Buffers(), load(form))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kernels", [None, *available()])
@pytest.mark.parametrize("backend", BACKENDS)
def test_products_and_sums_in_float32(kernels: str | None, backend: str) -> None:
    """Each way of computing them, against float64; also of groups whose mean is far from zero."""
    torch.manual_seed(0)
    products = Products(load(kernels) if kernels else None, backend)
    for offset in (0.0, 1000.0):
        x, d = torch.randn(6, 8, 5, 7) + offset, torch.randn(6, 8, 5, 7)
        X, D = x.double(), d.double()
        near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, check_dtype=False)
        near(products.sample_sums(d), D.sum(dim=(1, 2, 3)))
        near(products.channel_sums(d), D.sum(dim=(2, 3)))
        near(products.channel_dots(d, x), (D * X).sum(dim=(2, 3)), atol=1e-4 * max(1.0, offset))
        normal = nn.functional.group_norm(X, 2)
        dots = products.group_norm_dots(d, x, 2, 1e-5)
        assert (dots is None) == (kernels is None or offset > 0)
        if dots is not None:
            near(dots, (D * normal).sum(dim=(2, 3)))
    a, c = torch.randn(160, 24), torch.randn(160, 40)
    near(products.transposed_times(a, c), a.double().T @ c.double())
    near(products.inner_products(a), a.double() @ a.double().T)


@pytest.mark.parametrize("kernels", ["off", *available()])
@pytest.mark.parametrize("padding", [(1, 1), "same", 0])
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_convolutions_of_few_places_and_many_channels_are_held_as_factors(
    kernels: str, padding: tuple[int, int] | str | int, padding_mode: str
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(24, 40, 3, padding=padding, padding_mode=padding_mode)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(6, 24, 3, 3)
    model(x)
    moved = copy.deepcopy(model)
    steps = []
    for each, engine in ((model.double(), "loop"), (moved, Stream(kernels=kernels))):
        before = torch.cat([param.detach().flatten() for param in each.parameters()])
        optimizer = GramGaussNewton(each, lam=1.0, alpha=0.3, momentum=0.5, engine=engine)
        for _ in range(2):  # the second one multiplies J with the first
            optimizer.step(lambda each=each: each(x.to(next(each.parameters()).dtype)))
        steps.append(torch.cat([param.detach().flatten() for param in each.parameters()]) - before)
    assert (steps[1] - steps[0]).norm() <= 1e-4 * steps[0].norm()


@pytest.mark.parametrize("kernels", ["off", *available()])
@pytest.mark.parametrize("outlier_at", [0, 2])
def test_an_outlier_does_not_spoil_the_step(kernels: str, outlier_at: int) -> None:
    """G05: where one pixel saturates the network, at a step that is compared with autograd and at one that is not."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, engine=Stream(kernels=kernels))
    for step in range(3):
        x = torch.randn(4, 16, 16, 16)
        if step == outlier_at:
            x[0, :, 5, 5], x[1, :, 0, 15] = 1e6, -1e5
        precise = copy.deepcopy(model).double()
        changes = []
        for each, opt in (
            (precise, GramGaussNewton(precise, lam=1.0, alpha=0.3, engine="loop")),
            (model, optimizer),
        ):
            before = torch.cat([param.detach().flatten() for param in each.parameters()])
            inputs = x.to(before.dtype)
            opt.step(lambda each=each, inputs=inputs: each(inputs))
            changes.append(torch.cat([param.detach().flatten() for param in each.parameters()]) - before)
        assert (changes[1] - changes[0]).norm() <= 2e-4 * changes[0].norm()
