"""Captured steps, with the graphs replaced by calling the functions again: what is left of them is ours.

``tests/gpu`` captures real graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import GramGaussNewton, Stream
from gramgn.models import ResNetFixup
from gramgn.optim import experimental


class Again:
    """Does the work again instead of replaying it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.result = function, function()

    def replay(self) -> None:
        self.result = self.function()


def network() -> nn.Module:
    torch.manual_seed(0)
    return ResNetFixup(8, width=4, in_channels=1, zero_last_layer=False).double()


def batch(seed: int, b: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(b, 1, 8, 8, dtype=torch.float64, generator=generator),
        torch.randn(b, dtype=torch.float64, generator=generator),
    )


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step be captured where there are no CUDA graphs."""
    monkeypatch.setattr(experimental, "CudaGraph", Again)
    monkeypatch.setattr(experimental, "check_capturable", lambda optimizer, _device: optimizer._engine)


def captured(model: nn.Module, optimizer: GramGaussNewton, example: tuple[Tensor, Tensor]) -> Any:
    return optimizer.experimental_capture(lambda x, y: model(x) - y, *example)


VARIANTS = {
    "plain": {},
    "spring": {"momentum": 0.9},
    "levenberg_marquardt": {"adaptive_damping": {"factor": 3.0}},
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_steps_equal_those_of_a_closure(options: dict[str, Any]) -> None:
    model = network()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.5, damping_convention="mean", **options)
    other, eager = copy.deepcopy((model, optimizer))
    step = captured(model, optimizer, batch(99))
    for seed in range(4):
        x, y = batch(seed)
        info = step(x, y)
        expected = eager.step(lambda x=x, y=y: other(x) - y)
        assert info.loss == pytest.approx(expected.loss, rel=1e-10)
        assert info.step_norm == pytest.approx(expected.step_norm, rel=1e-8)
        assert info.status == expected.status
        kept = info.residual, info.gram
        step(*batch(seed + 50))
        eager.step(lambda seed=seed: other(batch(seed + 50)[0]) - batch(seed + 50)[1])
        # What a step reported outlives the next one, which writes to the same memory.
        assert torch.allclose(kept[0], expected.residual)
        assert torch.allclose(kept[1], expected.gram)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("on_cpu")
def test_other_inputs_than_captured_are_rejected() -> None:
    model = network()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.5)
    step = captured(model, optimizer, batch(0))
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"captured for inputs .*\[6, 1, 8, 8\].*got .*\[5, 1, 8, 8\]"):
        step(*batch(1, b=5))
    with pytest.raises(ValueError, match="captured for inputs"):
        step(batch(1)[0])
    with pytest.raises(ValueError, match="captured for inputs"):
        step(*(tensor.float() for tensor in batch(1)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("on_cpu")
def test_a_network_that_changed_is_rejected() -> None:
    model = network()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.5)
    step = captured(model, optimizer, batch(0))
    model.eval()
    with pytest.raises(ValueError, match="capture it again"):
        step(*batch(1))
    model.train()
    model.last.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="capture it again"):
        step(*batch(1))
    model.last.bias.requires_grad_(True)
    assert step(*batch(1)).status == "cholesky"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "vmap"}, "only engine='stream'"),
        ({"engine": Stream(chunk_size=4)}, "chunk_size and memory_budget"),
        ({"engine": Stream(memory_budget="least")}, "chunk_size and memory_budget"),
        ({"loss": "cross_entropy"}, "checked on the host"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_rejected(options: dict[str, Any], message: str) -> None:
    optimizer = GramGaussNewton(nn.Linear(2, 1), lam=1.0, alpha=0.5, **options)
    with pytest.raises(ValueError, match=message):
        experimental.check_capturable(optimizer, torch.device("cuda"))


def test_capture_needs_a_cuda_device() -> None:
    """G19: a clear error where there are no CUDA graphs."""
    model = nn.Linear(2, 1)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.5)
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match="CUDA graphs need the network on a CUDA device; it is on cpu"):
        optimizer.experimental_capture(lambda x: model(x), x)
