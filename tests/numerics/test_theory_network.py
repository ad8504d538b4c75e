"""The two-layer network: sigma', J and G against autograd, and the streaming engine on vectors against both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import all_trained, vjp
from theory_cases import SMOOTH, sphere, two_layer

from gramgn import GramGaussNewton
from gramgn.models import ACTIVATIONS
from gramgn.optim import SquaredError, Stream
from gramgn.theory import gram, jacobian


def autograd_jacobian(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return J [n, m], one backward pass for each sample."""
    (weight,) = (param for param in model.parameters())
    return torch.stack([torch.autograd.grad(model(x)[i], weight)[0].flatten() for i in range(len(x))])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_is_the_derivative(name: str) -> None:
    z = torch.cat([torch.linspace(-45, 45, 901), torch.tensor([19.9, 20.1, 39.9, 40.1])]).double() + 1e-3
    z.requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[name].function(z).sum(), z)
    torch.testing.assert_close(ACTIVATIONS[name].derivative(z), slope, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("activation", [*SMOOTH, "relu"])
@pytest.mark.filterwarnings("ignore:activation=relu")
def test_jacobian_is_autograds(activation: str) -> None:
    """Formula (2) to 1e-12, and formula (3) as its product; at W_0 and away from it."""
    x, y = sphere(12, 5)
    model = two_layer(33, 5, activation)
    for _ in range(2):
        J = autograd_jacobian(model, x)
        assert float((jacobian(model, x) - J).abs().max()) < 1e-12
        assert float((gram(model, x) - J @ J.T).abs().max()) < 1e-12
        GramGaussNewton(model, lam=1.0, alpha=0.1, damping_convention="sum").step(lambda: model(x) - y)


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("b", [1, 12])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 5}, {"memory_budget": "least"}])
def test_streaming_engine_on_vectors(activation: str, b: int, options: dict[str, Any]) -> None:
    """G, J d and J^T u of engine="stream" for vectors, where a linear layer is held as factors."""
    x, y = sphere(12, 5)
    x, y = x[:b], y[:b]
    model = two_layer(9, 5, activation)
    trained = all_trained(model)
    engine = Stream(**options).build()
    linear = engine.linearise(model, trained, lambda: model(x) - y, SquaredError())
    J = jacobian(model, x)
    u, d = torch.randn(b, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(linear.reading.residual, (model(x) - y).detach())
    torch.testing.assert_close(linear.gram().sum(dim=0), J @ J.T, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(linear.jvp([d]), J @ d.flatten(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(vjp(linear, trained, u)[0].flatten(), u @ J, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", SMOOTH)
def test_a_step_on_vectors_is_the_formula(activation: str) -> None:
    """The step w <- w - J^T (lam G + alpha I)^-1 (f - y), and for alpha = 0 the ridgeless one; a does not move."""
    x, y = sphere(10, 5)
    for lam, alpha in ((1.0, 0.0), (0.5, 0.2)):
        model = two_layer(40, 5, activation)
        J, r = jacobian(model, x), (model(x) - y).detach()
        w, signs = model.hidden.weight.detach().flatten().clone(), model.signs.clone()
        GramGaussNewton(model, lam=lam, alpha=alpha, damping_convention="sum").step(
            lambda net=model: net(x) - y
        )
        damped = lam * J @ J.T + alpha * torch.eye(len(x), dtype=torch.float64)
        expected = w - J.T @ torch.linalg.solve(damped, r)
        torch.testing.assert_close(model.hidden.weight.detach().flatten(), expected, rtol=1e-9, atol=1e-10)
        assert torch.equal(model.signs, signs)
