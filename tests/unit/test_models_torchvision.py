"""torchvision's networks as networks for regression: shapes, normalisation, and the step of Gram-Gauss-Newton."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from gramgn import GramGaussNewton
from gramgn.models import TorchvisionNetwork


def small(**options: Any) -> TorchvisionNetwork:
    """Return a network of torchvision that is cheap to build and to run: 342,817 parameters with one output."""
    torch.manual_seed(0)
    return TorchvisionNetwork("shufflenet_v2_x0_5", **options)


@pytest.mark.parametrize("channels", [1, 3])
def test_one_number_or_k_per_image(channels: int) -> None:
    x = torch.randn(2, channels, 32, 32)
    assert small(in_channels=channels)(x).shape == (2,)
    assert small(in_channels=channels, num_outputs=3)(x).shape == (2, 3)
    with pytest.raises(ValueError, match=r"takes images \[B, .*in_channels"):
        small(in_channels=channels)(torch.zeros(2, 2, 32, 32))


def test_group_norm_replaces_every_batch_norm() -> None:
    """With group normalisation an output depends on its own image alone; a number of channels may not divide by 32."""
    model = small()
    assert not model.batch_statistics
    kinds = {type(module) for module in model.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(model(x)[:2], model(x[:2]), atol=1e-5, rtol=1e-4)


def test_batch_norm_is_rejected_by_gram_gauss_newton() -> None:
    model = small(norm="batch")
    assert model.batch_statistics
    with pytest.raises(ValueError, match="uses the statistics of the batch"):
        GramGaussNewton(model, lam=1.0, alpha=0.3)


def test_the_step_of_resnet18_is_the_dense_one() -> None:
    """One step against Algorithm 1 in float64 with J from one backward pass per sample; its ReLUs act in place."""
    torch.manual_seed(0)
    model = TorchvisionNetwork("resnet18", in_channels=1, small_images=True).double()
    assert any(isinstance(module, nn.ReLU) and module.inplace for module in model.modules())
    assert isinstance(model.network.maxpool, nn.Identity)
    x, y = torch.randn(3, 1, 8, 8).double(), torch.randn(3).double()
    params = list(model.parameters())
    outputs = model(x)
    rows = [torch.autograd.grad(output, params, retain_graph=True) for output in outputs]
    J = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    residual = (outputs - y).detach()
    u = torch.linalg.solve(J @ J.T + 0.5 * torch.eye(3, dtype=torch.float64), residual)
    before = torch.cat([param.detach().flatten().clone() for param in params])
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.5, damping_convention="sum")
    optimizer.step(lambda: model(x) - y)
    step = before - torch.cat([param.detach().flatten() for param in params])
    torch.testing.assert_close(step, J.T @ u, rtol=1e-6, atol=1e-9 * float(step.abs().max()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "resnet81"}, "torchvision has no network 'resnet81'; there are: alexnet, .*resnet18"),
        ({"norm": "layer"}, "norm must be group or batch, got 'layer'"),
        ({"network": "shufflenet_v2_x0_5", "small_images": True}, "small_images=true is for the ResNets"),
        ({"network": "shufflenet_v2_x0_5", "num_groups": 0}, "num_groups must be a whole number"),
        ({"num_outputs": 0}, "num_outputs must be a whole number of at least 1, got 0"),
    ],
)
def test_options_that_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchvisionNetwork(**options)


def test_without_torchvision_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"need the package torchvision .*pip install torchvision"):
        TorchvisionNetwork()
