"""The two theorems on the network itself: order of convergence, constants and drifts against M, contraction."""

from __future__ import annotations

import statistics

import pytest
import torch
from theory_cases import sphere, two_layer

from gramgn.theory import (
    Path,
    contraction,
    fitted_exponent,
    follow,
    gram,
    jacobian,
    last_order,
    linear_residuals,
    quadratic_constants,
    spectral_radius,
    split,
)

NUM_SEEDS = 5
WIDTHS = (128, 512, 2048)


def full_batch(M: int, activation: str, seed: int, num_epochs: int) -> Path:
    x, y = sphere(seed=seed)
    return follow(two_layer(M, 20, activation, seed), x, y, num_epochs=num_epochs)


@pytest.mark.parametrize("activation", ["erf", "tanh", "softplus", "gelu"])
@pytest.mark.parametrize("M", [128, 512])
def test_full_batch_converges_quadratically(activation: str, M: int) -> None:
    """Theorem 1, formula (5): order 2, as the median over seeds, between 1.9 and 2.1."""
    found = [last_order(full_batch(M, activation, seed, 8).residuals) for seed in range(NUM_SEEDS)]
    assert 1.9 < statistics.median(found) < 2.1


def test_gradient_descent_has_order_one() -> None:
    """So that the measure can tell: a linear method on the same problem has order 1, and is far slower."""
    x, y = sphere()
    model = two_layer(512)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0 / float(torch.linalg.eigvalsh(gram(model, x))[-1]))

    def step(x_batch: torch.Tensor, y_batch: torch.Tensor) -> None:
        sgd.zero_grad()
        (0.5 * (model(x_batch) - y_batch).square().sum()).backward()
        sgd.step()

    path = follow(model, x, y, num_epochs=60, step=step)
    assert last_order(path.residuals) == pytest.approx(1.0, abs=0.05)
    assert path.residuals[-1] > 1e-2


@pytest.fixture(scope="module")
def against_width() -> dict[str, list[float]]:
    """Medians over seeds for each width: what the theorem and the lemmas bound."""
    found: dict[str, list[float]] = {"constant": [], "drift_J": [], "drift_G": [], "distance": []}
    for M in WIDTHS:
        paths = [full_batch(M, "erf", seed, 3) for seed in range(NUM_SEEDS)]
        found["constant"].append(statistics.median(quadratic_constants(p.residuals)[1] for p in paths))
        for name in ("drift_J", "drift_G", "distance"):
            found[name].append(statistics.median(getattr(p.points[-1], name) for p in paths))
    return found


@pytest.mark.parametrize("name", ["constant", "drift_G"])
def test_falls_faster_than_the_bound(against_width: dict[str, list[float]], name: str) -> None:
    """Bounded by M^(-1/2); about M^(-1) is measured, because the random signs a cancel."""
    assert -1.1 < fitted_exponent(WIDTHS, against_width[name]) < -0.9


def test_drift_of_the_jacobian(against_width: dict[str, list[float]]) -> None:
    """|J - J_0| = O(R sqrt(n / M)): slope -1/2, and R itself does not depend on M."""
    assert -0.6 < fitted_exponent(WIDTHS, against_width["drift_J"]) < -0.4
    assert abs(fitted_exponent(WIDTHS, against_width["distance"])) < 0.1


def test_a_point_is_what_it_says() -> None:
    """Norms of dense differences of J, G and W."""
    x, y = sphere(12, 5)
    model = two_layer(20, 5)
    J, G, W = jacobian(model, x), gram(model, x), model.hidden.weight.detach().clone()
    point = follow(model, x, y, num_epochs=2, batch_size=5).points[-1]
    change = jacobian(model, x) - J
    assert point.residual == pytest.approx(float((model(x) - y).detach().norm()), abs=1e-14)
    assert point.drift_J == pytest.approx(float(change.norm()), rel=1e-10)
    assert point.drift_J_row == pytest.approx(float(change.norm(dim=1).max()), rel=1e-10)
    assert point.drift_G == pytest.approx(
        float(torch.linalg.matrix_norm(gram(model, x) - G, ord=2)), rel=1e-9
    )
    assert point.distance == pytest.approx(float((model.hidden.weight.detach() - W).norm()), rel=1e-12)


def test_mini_batches_contract_as_predicted() -> None:
    """Theorem 2: c of the network is that of A to 1 %; against rho(A) the median over seeds is within 5 %.

    rho is the limit of many epochs. For a finite number A itself contracts by another factor, up to 10 % away from
    1 - rho for a single seed (conjugate pairs and neighbours of the leading eigenvalue); the network follows A.
    """
    of_rho, of_A, b = [], [], 20
    for seed in range(3):
        x, y = sphere(60, seed=seed)
        model = two_layer(2048, 20, "gelu", seed)
        splitting = split(gram(model, x), b)
        rho = spectral_radius(splitting)
        assert rho <= 0.95
        r = (model(x) - y).detach()
        measured = follow(model, x, y, num_epochs=60, batch_size=b).residuals
        above = sum(value > 1e-11 for value in measured)
        c, c_A = contraction(measured), contraction(linear_residuals(splitting, r, above - 1))
        of_rho.append((1 - c) / (1 - rho) - 1)
        of_A.append((1 - c) / (1 - c_A) - 1)
    assert abs(statistics.median(of_rho)) <= 0.05
    assert max(map(abs, of_A)) <= 0.01


def test_random_order_contracts_too_but_not_as_cyclic() -> None:
    x, y = sphere(60)
    paths = {
        order: follow(two_layer(512), x, y, num_epochs=20, batch_size=20, order=order)
        for order in ("cyclic", "shuffle")
    }
    last = {order: path.residuals[-1] / path.residuals[0] for order, path in paths.items()}
    assert max(last.values()) < 1e-2
    assert last["cyclic"] != pytest.approx(last["shuffle"], rel=1e-3)
