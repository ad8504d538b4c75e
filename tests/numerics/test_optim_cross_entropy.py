"""Classification: the step is that of the dense generalised Gauss-Newton matrix, in parameter space."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import CASES_BY_NAME, Problem
from dense import Dense, relative_error, split_groups
from test_optim_variants import VARIANTS
from torch import Tensor, nn

from gramgn import GramGaussNewton

LABELS = torch.tensor([0, 2, 1, 1, 0, 2])


def logits_problem(name: str = "mlp_three_outputs") -> Problem:
    problem = CASES_BY_NAME[name].make()
    return Problem(problem.model, problem.args, lambda f: f)


@pytest.mark.parametrize(
    ("convention", "engine"),
    [("mean", "stream"), ("trace", "stream"), ("sum", "vmap"), ("mean", "loop")],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_are_those_of_the_generalised_gauss_newton_matrix(
    variant: str, convention: str, engine: str
) -> None:
    options = [{**given, "damping_convention": convention} for given in VARIANTS[variant]]
    problem = logits_problem()
    groups, of_each = split_groups(problem, options)
    optimizer = GramGaussNewton(
        problem.model,
        groups,
        **{"damping_convention": "sum", **options[0]},
        loss="cross_entropy",
        engine=engine,
    )
    dense = Dense(logits_problem(), of_each, options, LABELS)
    start = dense.w
    for _ in range(5):
        info = optimizer.step(lambda: (problem.closure(), LABELS))
        dense.step()
    assert relative_error(problem.flat(), dense.w, start) < 1e-10
    assert info.gram.shape == (18, 18)


@pytest.mark.parametrize("engine", ["stream", "vmap"])
def test_chunks_do_not_change_it(engine: str) -> None:
    """G02: some samples at a time, the root of the curvature included."""
    ends = []
    for chunk_size in (None, 4):
        problem = logits_problem()
        optimizer = GramGaussNewton(
            problem.model,
            lam=1.0,
            alpha=0.1,
            loss="cross_entropy",
            engine={"name": engine, "chunk_size": chunk_size},
        )
        for _ in range(2):
            optimizer.step(lambda problem=problem: (problem.closure(), LABELS))
        ends.append(problem.flat())
    assert torch.allclose(*ends, rtol=1e-10, atol=1e-12)


def test_what_the_info_says() -> None:
    """The loss is the mean cross-entropy; R r = p - e; b of the eigenvalues of G are 0; the decrease is its model's."""
    problem = logits_problem()
    logits = problem.closure().detach()
    dense = Dense(logits_problem(), [0] * 4, [{"lam": 1.0, "alpha": 0.3}], LABELS)
    _, gradient, curvature = dense.gradient_and_curvature()
    optimizer = GramGaussNewton(
        problem.model, lam=1.0, alpha=0.3, damping_convention="sum", loss="cross_entropy"
    )
    info = optimizer.step(lambda: (problem.closure(), LABELS))
    assert info.loss == pytest.approx(float(nn.functional.cross_entropy(logits, LABELS)), rel=1e-12)
    p = torch.softmax(logits, dim=1)
    R = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    wrong = p - nn.functional.one_hot(LABELS, 3)
    assert torch.allclose((R @ info.residual[:, :, None])[:, :, 0], wrong, atol=1e-14)
    eigenvalues = torch.linalg.eigvalsh(info.gram)
    assert float(eigenvalues[:6].abs().max()) < 1e-12 * float(eigenvalues[-1])
    assert float(eigenvalues[6]) > 1e-6 * float(eigenvalues[-1])
    d = problem.flat() - dense.w
    expected = -float(gradient @ d + d @ curvature @ d / 2) / 6
    assert info.predicted_decrease == pytest.approx(expected, rel=1e-10)
    assert info.trace == pytest.approx(float(curvature.trace()), rel=1e-12)


def test_without_damping_it_is_the_minimum_norm_step() -> None:
    """The b zero eigenvalues of G are cut off: d = -C^+ g."""
    problem = logits_problem()
    dense = Dense(logits_problem(), [0] * 4, [{"lam": 2.0, "alpha": 0.0}], LABELS)
    _, gradient, curvature = dense.gradient_and_curvature()
    optimizer = GramGaussNewton(problem.model, lam=2.0, alpha=0.0, loss="cross_entropy")
    with pytest.warns(RuntimeWarning, match="small eigenvalues of G"):
        info = optimizer.step(lambda: (problem.closure(), LABELS))
    expected = -torch.linalg.pinv(curvature, rtol=1e-12, hermitian=True) @ gradient / 2
    assert (info.status, info.ill_conditioned) == ("minimum_norm", True)
    assert float((problem.flat() - dense.w - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("height", [0.0, 20.0, 40.0, 60.0, 80.0, 120.0, 200.0, 2000.0])
def test_saturated_logits(height: float, dtype: torch.dtype) -> None:
    """The right class has p_c = exp(-height): sqrt(p) and 1 / sqrt(p) cancel, and the step stays right.

    Rows of J of size sqrt(p_c) stand beside residuals of size 1 / sqrt(p_c), in a graded matrix that a Cholesky
    decomposition solves row by row.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, height, 0.3]))
    exact = Problem(model, (torch.randn(5, 4, dtype=torch.float64),), lambda f: f)
    labels = torch.tensor([0, 0, 1, 2, 0])
    dense = Dense(exact, [0, 0], [{"lam": 1.0, "alpha": 0.3}], labels)
    dense.step()
    given = copy.deepcopy(model).to(dtype)
    x = exact.args[0].to(dtype)
    start = torch.cat([param.detach().flatten() for param in given.parameters()]).double()
    info = GramGaussNewton(given, lam=1.0, alpha=0.3, damping_convention="sum", loss="cross_entropy").step(
        lambda: (given(x), labels)
    )
    end = torch.cat([param.detach().flatten() for param in given.parameters()]).double()
    assert info.status == "cholesky"
    assert float((end - start - dense.d).norm() / dense.d.norm()) < (1e-9 if dtype == torch.float64 else 1e-5)
    _, gradient, curvature = Dense(
        exact, [0, 0], [{"lam": 1.0, "alpha": 0.3}], labels
    ).gradient_and_curvature()
    expected = -float(gradient @ dense.d + dense.d @ curvature @ dense.d / 2) / 5
    assert info.predicted_decrease == pytest.approx(expected, rel=1e-9 if dtype == torch.float64 else 1e-4)


def test_logits_beyond_the_format_change_nothing() -> None:
    """G04: infinite logits, and NaN ones."""
    for value in (float("inf"), float("nan")):
        problem = logits_problem()
        before = problem.flat()
        optimizer = GramGaussNewton(
            problem.model, lam=1.0, alpha=0.3, damping_convention="sum", loss="cross_entropy", momentum=0.9
        )
        with pytest.warns(RuntimeWarning, match="not finite"):
            info = optimizer.step(lambda value=value, problem=problem: (problem.closure() + value, LABELS))
        assert info.status == "non_finite"
        assert torch.equal(problem.flat(), before)


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda f: f, r"pair of tensors \(logits \[b, k\], labels \[b\]\), got Tensor"),
        (lambda f: (f, LABELS.tolist()), "pair of tensors"),
        (lambda f: (f[:, 0], LABELS), r"logits must have shape \[b, k\] with k >= 2 classes"),
        (lambda f: (f[:, :1], LABELS), "k >= 2 classes"),
        (lambda f: (f, LABELS.double()), "labels must be whole numbers"),
        (lambda f: (f, LABELS[:3]), "labels must be whole numbers"),
        (lambda f: (f, LABELS + 1), "labels must lie in 0 to 2, .* got 1 to 3"),
        (lambda f: (f, LABELS - 1), "labels must lie in 0 to 2, .* got -1 to 1"),
        (lambda f: (f.detach(), LABELS), "do not depend on the model's output"),
    ],
)
def test_closures_that_return_something_else(closure: Any, message: str) -> None:
    problem = logits_problem()
    before = problem.flat()
    optimizer = GramGaussNewton(
        problem.model, lam=1.0, alpha=0.3, damping_convention="sum", loss="cross_entropy"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: closure(problem.closure()))
    assert torch.equal(problem.flat(), before)


def test_separable_classes_are_learnt() -> None:
    """A few steps on three clusters tell them apart, with every loss below that of guessing."""
    torch.manual_seed(0)
    centres = torch.tensor([[2.0, 0.0], [-2.0, 1.0], [0.0, -2.0]])
    labels = torch.arange(90) % 3
    x: Tensor = centres[labels] + 0.5 * torch.randn(90, 2)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = GramGaussNewton(
        model, lam=1.0, alpha=0.1, damping_convention="mean", loss="cross_entropy", momentum=0.5
    )
    for _ in range(20):
        info = optimizer.step(lambda: (model(x), labels))
    assert info.loss < 0.1
    assert float((model(x).argmax(dim=1) == labels).float().mean()) > 0.97
