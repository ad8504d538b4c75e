"""The whole step against a dense float64 reference in parameter space, and on problems with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES_BY_NAME, VMAP_CASES, Case, Problem
from torch import Tensor, nn

from gramgn import GramGaussNewton, Stream, Vmap

TOLERANCE = 1e-9

pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for")


def reference_step(problem: Problem, J: Tensor, lam: float, alpha_sum: float) -> Tensor:
    """Return d [m] = V s / (lam s^2 + alpha) U^T r with J = U s V^T, equal to J^T (lam J J^T + alpha I)^-1 r.

    Without damping, singular values that are rounding are left out. No Gram matrix and none of the
    optimizer's code is used.
    """
    r = problem.residual_at(problem.flat())
    U, s, Vt = torch.linalg.svd(J, full_matrices=False)
    filtered = torch.where(s > 1e-7 * s[0], s / (lam * s**2 + alpha_sum), 0.0)
    return Vt.T @ (filtered * (U.T @ r))


@pytest.mark.parametrize(
    ("lam", "alpha", "convention"), [(1.0, 0.3, "mean"), (0.25, 0.05, "sum"), (4.0, 2.0, "mean")]
)
@pytest.mark.parametrize("case", VMAP_CASES, ids=lambda case: case.name)
def test_step_is_the_dense_step(case: Case, lam: float, alpha: float, convention: str) -> None:
    problem = case.make()
    alpha_sum = alpha * len(problem.args[0]) if convention == "mean" else alpha
    before, expected = problem.flat(), reference_step(problem, case.jacobian(), lam, alpha_sum)
    frozen = {n: p.clone() for n, p in problem.model.named_parameters() if not p.requires_grad}
    optimizer = GramGaussNewton(problem.model, lam=lam, alpha=alpha, damping_convention=convention)
    info = optimizer.step(problem.closure)
    assert float((before - problem.flat() - expected).norm() / expected.norm()) < TOLERANCE
    assert info.status == "cholesky"
    assert not info.ill_conditioned
    assert info.alpha_sum == pytest.approx(alpha_sum)
    assert info.step_norm == pytest.approx(float(expected.norm()), rel=1e-9)
    # G06: what is frozen stays bitwise.
    assert all(torch.equal(frozen[n], p) for n, p in problem.model.named_parameters() if n in frozen)


@pytest.mark.parametrize(
    "name", ["mlp", "mlp_three_outputs", "tied_weights", "resnet_gn", "mlp_fewer_residuals"]
)
def test_step_without_damping_is_the_minimum_norm_step(name: str) -> None:
    problem = CASES_BY_NAME[name].make()
    before, expected = problem.flat(), reference_step(problem, CASES_BY_NAME[name].jacobian(), 2.0, 0.0)
    info = GramGaussNewton(problem.model, lam=2.0, alpha=0.0).step(problem.closure)
    assert float((before - problem.flat() - expected).norm() / expected.norm()) < 1e-7
    assert info.status == "minimum_norm"


@pytest.mark.parametrize("engine", ["vmap", "stream", "loop"])
def test_engine_and_chunk_size_do_not_change_the_step(engine: str) -> None:
    """G02: chunked, whole and row by row agree."""
    steps = []
    for chosen in (engine, Vmap(chunk_size=2), Stream(chunk_size=2)):
        problem = CASES_BY_NAME["resnet_fixup"].make()
        optimizer = GramGaussNewton(
            problem.model, lam=1.0, alpha=0.1, damping_convention="sum", engine=chosen
        )
        optimizer.step(problem.closure)
        steps.append(problem.flat())
    for other in steps[1:]:
        assert torch.allclose(steps[0], other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lr", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("lam", [0.25, 1.0])
def test_numbers_of_the_info(lr: float, lam: float) -> None:
    """The loss is mean(r^2); the predicted decrease is that of the linear model along the step."""
    problem = CASES_BY_NAME["mlp_three_outputs"].make()
    J, r, before = problem.dense_jacobian(), problem.residual_at(problem.flat()), problem.flat()
    info = GramGaussNewton(problem.model, lr=lr, lam=lam, alpha=0.3, damping_convention="sum").step(
        problem.closure
    )
    change = problem.flat() - before
    assert info.loss == pytest.approx(float((r**2).sum()) / 18, rel=1e-12)
    assert info.predicted_decrease == pytest.approx(
        info.loss - float(((r + J @ change) ** 2).mean()), abs=1e-12
    )
    assert info.step_norm == pytest.approx(float(change.norm()), rel=1e-9, abs=1e-15)
    assert info.trace == pytest.approx(float((J**2).sum()), rel=1e-12)
    assert info.spectrum() == pytest.approx(
        (float(torch.linalg.svdvals(J)[-1] ** 2), float(torch.linalg.svdvals(J)[0] ** 2)), rel=1e-6
    )
    assert (info.num_samples, info.lam, info.residual.shape) == (6, lam, (6, 3))
    assert torch.allclose(info.gram, J @ J.T)


@pytest.mark.parametrize("outputs", [1, 3])
def test_linear_least_squares_is_solved_in_one_step(outputs: int) -> None:
    """With alpha = 0 and lam = 1 fewer samples than parameters are fitted exactly, by the nearest fit."""
    torch.manual_seed(0)
    model = nn.Linear(8, outputs).double()
    x, y = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, outputs, dtype=torch.float64)
    start = torch.cat([model.weight.detach(), model.bias.detach()[:, None]], dim=1)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.0)
    optimizer.step(lambda: model(x) - y)
    assert torch.allclose(model(x), y, atol=1e-12)
    # Of all solutions it is the nearest to the start: the change lies in the span of the inputs.
    change = torch.cat([model.weight.detach(), model.bias.detach()[:, None]], dim=1) - start
    inputs = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], dim=1)
    assert torch.allclose(change @ torch.linalg.pinv(inputs) @ inputs, change, atol=1e-10)


def test_more_samples_than_parameters_give_the_least_squares_fit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="small eigenvalues of G"):
        GramGaussNewton(model, lam=1.0, alpha=0.0).step(lambda: model(x) - y)
    assert torch.allclose(model.weight.T, torch.linalg.lstsq(x, y).solution, atol=1e-10)


@pytest.mark.parametrize("convention", ["sum", "mean"])
def test_ridge_regression_in_closed_form(convention: str) -> None:
    """From zero one step on a linear model is ridge regression: alpha beside the sum, or beside the mean."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    GramGaussNewton(model, lam=1.0, alpha=0.5, damping_convention=convention).step(lambda: model(x) - y)
    penalty = 0.5 * (20 if convention == "mean" else 1)
    ridge = torch.linalg.solve(x.T @ x + penalty * torch.eye(3, dtype=torch.float64), x.T @ y)
    assert torch.allclose(model.weight.T, ridge, atol=1e-12)


@pytest.mark.parametrize("b", [1, 2, 7])
def test_the_mean_convention_uses_the_actual_batch(b: int) -> None:
    """G05: any b >= 1 works, down to one sample, and b is that of the batch at hand, not of the rows."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    x, y = torch.randn(b, 4, dtype=torch.float64), torch.randn(b, 2, dtype=torch.float64)
    info = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean").step(lambda: model(x) - y)
    assert info.alpha_sum == pytest.approx(0.3 * b)
    assert info.num_samples == b
    assert math.isfinite(info.step_norm)


class Rosenbrock(nn.Module):
    """f = (10 (v - u^2), 1 - u): half of its squares is the Rosenbrock function."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.point
        return torch.stack([10 * (v - u**2), 1 - u])[None] * x


@pytest.mark.parametrize(("alpha", "steps"), [(0.0, 3), (0.01, 40)])
def test_rosenbrock_as_least_squares(alpha: float, steps: int) -> None:
    """Gauss-Newton meets the minimum at (1, 1) within three steps, damped within some more."""
    model = Rosenbrock()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=alpha, damping_convention="sum")
    x = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(steps):
        optimizer.step(lambda: model(x))
    assert torch.allclose(model.point, torch.ones(2, dtype=torch.float64), atol=1e-6)


def test_actual_decrease_follows_the_predicted_one_for_short_steps() -> None:
    """A first-order check that needs no Jacobian: (decrease / lr) converges to the predicted one."""
    gaps = []
    for lr in (1e-2, 1e-3):
        problem = CASES_BY_NAME["tied_weights"].make()
        info = GramGaussNewton(problem.model, lr=lr, lam=1.0, alpha=1.0, damping_convention="sum").step(
            problem.closure
        )
        after = problem.closure().square().mean().item()
        gaps.append(abs((info.loss - after) / info.predicted_decrease - 1))
    assert gaps[1] < 0.02
    assert gaps[1] < gaps[0] / 5
