"""Kernels of the streaming engine, against float64 and against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn.optim.stream import LIBRARIES, PATHS, Buffers, Memory, Products, applicable


@pytest.mark.parametrize(
    ("parts", "n", "size"),
    # Small and large products, with few and with many rows.
    [(1, 3, 7), (3, 5, 8), (1, 40, 7000), (2, 257, 400), (3, 600, 31), (1, 8, 300_001)],
)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gram_product_of_any_size_is_rows_times_rows(
    parts: int, n: int, size: int, library: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(parts, n, size, dtype=torch.float64).to(dtype)
    expected = torch.einsum("pis,pjs->ij", rows.double(), rows.double())
    G = Products(library=library).gram(rows)
    assert G.dtype == torch.float64
    bound = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    assert (G - expected).abs().max() <= bound * expected.abs().max()


def weight_gradients(layer: nn.Conv2d, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of each sample by itself, by autograd."""
    return torch.stack(
        [torch.autograd.grad(layer(x[i : i + 1]), layer.weight, grad[i : i + 1])[0] for i in range(len(x))]
    )


def formed(path: str, layer: nn.Conv2d, x: Tensor, grad: Tensor, buffers: Buffers) -> Tensor:
    memory = Memory(buffers, lambda parts, size, like: like.new_empty(parts, len(x), size), Products())
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
