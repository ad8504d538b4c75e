"""Relaxed full-batch steps and gradient descent on the linearised network, beside dense iterations and the network."""

from __future__ import annotations

import pytest
import torch
from theory_cases import sphere, two_layer

from gramgn.theory import (
    FullBatch,
    best_learning_rate,
    contraction,
    descent_step,
    follow,
    gauss_newton,
    ggn_step,
    gradient_descent,
    gram,
)

DAMPINGS = [(1.0, 0.0), (2.0, 0.0), (0.75, 0.0), (1.0, 0.1), (0.6, 3.0)]


def dense(M: torch.Tensor, r: torch.Tensor, num_steps: int) -> list[float]:
    """Return |r|, |M r|, ..., by matrix products."""
    norms = [float(r.norm())]
    for _ in range(num_steps):
        r = M @ r
        norms.append(float(r.norm()))
    return norms


@pytest.fixture(scope="module")
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Return G_0 and f_0 - y."""
    x, y = sphere(40)
    model = two_layer(256)
    return gram(model, x), (model(x) - y).detach()


@pytest.mark.parametrize(("lam", "alpha"), DAMPINGS)
def test_relaxed_step_is_formula_10(
    problem: tuple[torch.Tensor, torch.Tensor], lam: float, alpha: float
) -> None:
    G, r = problem
    eye = torch.eye(len(G), dtype=G.dtype)
    M = eye - G @ torch.linalg.inv(lam * G + alpha * eye)
    found = gauss_newton(G, lam=lam, alpha=alpha)
    assert found.residuals(r, 4) == pytest.approx(dense(M, r, 4), rel=1e-9, abs=1e-9)
    assert found.rho == pytest.approx(float(torch.linalg.eigvals(M).abs().max()), abs=1e-10)


def test_descent_is_formula_11(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    G, r = problem
    lr = best_learning_rate(G)
    eye = torch.eye(len(G), dtype=G.dtype)
    found = gradient_descent(G, lr=lr)
    assert found.residuals(r, 20) == pytest.approx(dense(eye - lr * G, r, 20), rel=1e-10)
    values = torch.linalg.eigvalsh(G)
    kappa = float(values[-1] / values[0])
    assert found.rho == pytest.approx((kappa - 1) / (kappa + 1), rel=1e-10)
    for other in (0.9 * lr, 1.1 * lr):
        assert gradient_descent(G, lr=other).rho > found.rho
    assert gradient_descent(G, lr=2.1 / float(values[-1])).rho > 1


@pytest.mark.parametrize(("lam", "alpha"), DAMPINGS[1:])
def test_the_network_follows(lam: float, alpha: float) -> None:
    """A wide network contracts as its linearisation does over the same steps."""
    x, y = sphere(40)
    model = two_layer(4096)
    linear = gauss_newton(gram(model, x), lam=lam, alpha=alpha).residuals((model(x) - y).detach(), 12)
    measured = follow(model, x, y, num_epochs=12, step=ggn_step(model, lam=lam, alpha=alpha)).residuals
    assert contraction(measured) == pytest.approx(contraction(linear), rel=0.01)


def test_descent_of_the_network() -> None:
    x, y = sphere(40)
    model = two_layer(4096)
    G = gram(model, x)
    lr = best_learning_rate(G)
    linear = gradient_descent(G, lr=lr).residuals((model(x) - y).detach(), 40)
    measured = follow(model, x, y, num_epochs=40, step=descent_step(model, lr=lr)).residuals
    assert measured[:5] == pytest.approx(linear[:5], rel=0.05)
    assert contraction(measured) == pytest.approx(contraction(linear), rel=0.05)


def test_a_null_space_stays() -> None:
    """Repeated inputs: with opposite targets the residual cannot vanish, whatever alpha is."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    G = gram(two_layer(16, 2), x)
    r = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    for alpha in (0.0, 0.1):
        found = gauss_newton(G, alpha=alpha)
        assert found.rho == 1.0
        assert found.residuals(r, 50)[-1] == pytest.approx(2**0.5, rel=1e-6)


def test_refusals() -> None:
    G = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="lam must be above 0"):
        gauss_newton(G, lam=0.0)
    with pytest.raises(ValueError, match="lr must be above 0"):
        gradient_descent(G, lr=float("nan"))
    with pytest.raises(ValueError, match="square matrix"):
        gauss_newton(G[:2])
    with pytest.raises(ValueError, match="float64"):
        best_learning_rate(G.float())
    with pytest.raises(ValueError, match="G is zero"):
        best_learning_rate(0 * G)
    with pytest.raises(ValueError, match=r"residuals \[3\]"):
        FullBatch(torch.ones(3), G).residuals(torch.ones(2, dtype=torch.float64), 1)
