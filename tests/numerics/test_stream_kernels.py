"""Kernels of the streaming engine by themselves, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gramgn.optim.stream import PATHS, Buffers, Memory, accumulate, conv, gram_of


@pytest.mark.parametrize(
    ("parts", "n", "size"), [(1, 3, 7), (3, 5, 8), (1, 40, 7000), (2, 257, 400), (3, 600, 31)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gram_product_of_any_size_is_rows_times_rows(
    parts: int, n: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(parts, n, size, dtype=torch.float64).to(dtype)
    expected = torch.einsum("pis,pjs->ij", rows.double(), rows.double())
    G = gram_of(rows)
    assert G.dtype == torch.float64
    bound = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    assert (G - expected).abs().max() <= bound * expected.abs().max()


def test_large_and_small_products_are_both_among_the_cases() -> None:
    assert 3 * 3 * 7 < accumulate.LARGE < 257 * 257 * 400
    assert accumulate.LARGE < 40 * 40 * 7000
    assert 40 < accumulate.MANY_ROWS < 257


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("path", ["strips", "columns"])
@pytest.mark.parametrize("padding", [(1, 1), (2, 0), (0, 1)])
def test_samples_taken_a_few_at_a_time_give_the_same_block(
    path: str, padding: tuple[int, int], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    b, C, F, plane = 7, 2, 3, (5, 6)
    kernel = (2 * padding[0] + 1, 2 * padding[1] + 1)
    layer = nn.Conv2d(C, F, kernel, padding=padding, dtype=torch.float64)
    x = torch.randn(b, C, *plane, dtype=torch.float64)
    grad = torch.randn(b, F, *plane, dtype=torch.float64)
    expected = torch.stack(
        [
            torch.nn.grad.conv2d_weight(x[i : i + 1], layer.weight.shape, grad[i : i + 1], padding=padding)
            for i in range(b)
        ]
    )
    monkeypatch.setattr(conv, "LEAST_SAMPLES", at_a_time)
    monkeypatch.setattr(conv, "STRIPS_BYTES", 1)
    monkeypatch.setattr(conv, "COLUMNS_BYTES", 1)
    memory = Memory(Buffers(), lambda parts, size, like: like.new_empty(parts, b, size))
    with torch.no_grad():
        for _ in range(2):  # the second time in memory that was written to
            block = PATHS[path](layer, x, grad, padding, memory)
            formed = torch.stack([block.layout.to_param(row.flatten()) for row in block.rows.unbind(1)])
            torch.testing.assert_close(formed, expected, rtol=1e-12, atol=1e-12)
            memory.buffers.get("strips", (1,), x).fill_(float("nan"))
            memory.buffers.get("padded", (1,), x).fill_(float("nan"))
