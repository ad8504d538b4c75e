"""Every network with its optimizers can fit 32 fixed images of noise with random targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.models import ResNetBN, ResNetFixup, ResNetGN

Network = Callable[..., nn.Module]


def problem(network: Network, **options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = network(8, in_channels=1, **options)
    return model, torch.randn(32, 1, 8, 8), torch.randn(32)


def sgd_steps(model: nn.Module, x: Tensor, y: Tensor, *, lr: float, steps: int) -> list[float]:
    """Return the losses before each step of SGD with momentum 0.9."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("zero_last_layer", [False, True])
@pytest.mark.parametrize("network", [ResNetFixup, ResNetGN])
def test_ggn_fits_a_fixed_batch(network: Network, zero_last_layer: bool) -> None:
    """G07: the loss falls by more than 90 %, from a zero last layer too."""
    model, x, y = problem(network, zero_last_layer=zero_last_layer)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
    losses = [optimizer.step(lambda: model(x) - y).loss for _ in range(15)]
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.counts["non_finite"] == 0


@pytest.mark.parametrize(
    ("network", "lr", "steps"), [(ResNetFixup, 0.005, 300), (ResNetGN, 0.01, 80), (ResNetBN, 0.01, 80)]
)
def test_sgd_fits_a_fixed_batch(network: Network, lr: float, steps: int) -> None:
    """G07: the loss falls by more than 90 % for SGD with momentum on every network."""
    losses = sgd_steps(*problem(network), lr=lr, steps=steps)
    assert losses[-1] < 0.1 * losses[0]


def share_of_zero_gradients(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of parameters, counted by tensor, whose gradient is exactly zero."""
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    zero = [not bool(param.grad.any()) for param in model.parameters() if param.grad is not None]
    return sum(zero) / len(zero)


@pytest.mark.parametrize("method", ["ggn", "sgd"])
def test_every_fixup_parameter_has_a_gradient_after_a_few_steps(method: str) -> None:
    """G07: at first only weight and bias of the last layer have one, after three steps every tensor has."""
    model, x, y = problem(ResNetFixup)
    shares = [share_of_zero_gradients(model, x, y)]
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
    for _ in range(3):
        if method == "ggn":
            optimizer.step(lambda: model(x) - y)
        else:
            sgd_steps(model, x, y, lr=0.01, steps=1)
        shares.append(share_of_zero_gradients(model, x, y))
    num_tensors = len(list(model.parameters()))
    assert shares[0] == (num_tensors - 2) / num_tensors
    assert shares[-1] == 0.0
    assert all(bool(torch.isfinite(param).all()) for param in model.parameters())


def test_first_step_from_a_zero_last_layer_moves_that_layer_only() -> None:
    """With a zero last layer G = Phi Phi^T + 1: rank at most 4 width + 1, and no NaN from the dead rest."""
    model, x, y = problem(ResNetFixup, width=4)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    info = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="sum").step(lambda: model(x) - y)
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == {"last.weight", "last.bias"}
    eigenvalues = torch.linalg.eigvalsh(info.gram)
    assert int((eigenvalues > 1e-6 * eigenvalues[-1]).sum()) <= 4 * 4 + 1


def test_batch_norm_evaluates_as_it_trains() -> None:
    """T16: after 80 steps on one batch the loss in evaluation mode is within 10 times that in training mode.

    The running statistics have converged with the default momentum; with a momentum of 0.001 they have not.
    """
    ratios = []
    for bn_momentum in (0.1, 0.001):
        model, x, y = problem(ResNetBN, bn_momentum=bn_momentum)
        sgd_steps(model, x, y, lr=0.01, steps=80)
        with torch.no_grad():
            in_training = (model(x) - y).square().mean().item()
            model.eval()
            in_evaluation = (model(x) - y).square().mean().item()
        ratios.append(in_evaluation / in_training)
    assert ratios[0] < 10
    assert ratios[1] > 100
