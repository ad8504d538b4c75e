"""Armijo's rule, against a search by hand with autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES_BY_NAME, Problem
from dense import Dense
from torch import Tensor

from gramgn import GramGaussNewton
from gramgn.optim import Armijo

ENGINES = ("stream", "vmap", "loop")


def armijo_by_hand(problem: Problem, d: Tensor, c: float, shrink: float, tries: int) -> float:
    """Return t of L(w + t d) <= L(w) + c t <grad L, d> with the gradient by autograd, 0 if there is none."""
    w = problem.flat().requires_grad_()
    loss: Callable[[Tensor], Tensor] = lambda at: problem.residual_at(at).square().mean()  # noqa: E731
    start = loss(w)
    (gradient,) = torch.autograd.grad(start, w)
    t = 1.0
    for _ in range(tries):
        with torch.no_grad():
            if loss(w + t * d) <= start + c * t * (gradient @ d):
                return t
        t *= shrink
    return 0.0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("c", [1e-4, 0.6, 0.99])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"lr": 3.0}, {"max_step_norm": 0.5, "lam": 0.6}])
def test_armijo_takes_the_first_step_length_that_is_short_enough(
    options: dict[str, Any], c: float, engine: str
) -> None:
    problem, twin = CASES_BY_NAME["mlp_curved"].make(), CASES_BY_NAME["mlp_curved"].make()
    given = {"lam": 1.0, "alpha": 0.01, **options}
    search = Armijo(c=c, shrink=0.4, max_tries=6)
    optimizer = GramGaussNewton(
        problem.model, **{"damping_convention": "sum", **given}, line_search=search, engine=engine
    )
    dense, fractions = Dense(twin, [0] * 4, [given]), []
    for _ in range(4):
        before = dense.w
        dense.step()
        d = dense.w - before
        t = armijo_by_hand(problem, d, c, 0.4, 6)
        info = optimizer.step(problem.closure)
        assert float((problem.flat() - before - t * d).norm()) < 1e-9 * float(d.norm())
        assert info.given_up == (t == 0)
        assert info.step_norm == pytest.approx(t * float(d.norm()), rel=1e-8)
        dense.w = before + t * d
        # Momentum is that of the step that was taken: one that was given up leaves none.
        dense.d = t * dense.d
        fractions.append(t)
    assert set(fractions) != {1.0} or c < 0.9


def test_armijo_with_groups_measures_the_slope_of_each_ones_length() -> None:
    problem = CASES_BY_NAME["mlp_three_outputs"].make()
    params = list(problem.model.parameters())
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 2.0, "alpha": 3.0}]
    optimizer = GramGaussNewton(
        problem.model,
        groups,
        lam=1.0,
        alpha=0.5,
        damping_convention="sum",
        momentum=0.5,
        line_search="armijo",
    )
    optimizer.step(problem.closure)
    seen: list[float] = []
    decide = type(optimizer._acceptance).decide

    def spying(self: Any, propose: Any, along: Any, groups: Any) -> Any:
        line = along(propose())
        seen.append(line.slope)
        return decide(self, propose, along, groups)

    w = problem.flat().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.residual_at(w).square().mean(), w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Armijo, "decide", spying)
        before = problem.flat()
        info = optimizer.step(problem.closure)
    change = problem.flat() - before
    t = info.lr / 0.5
    assert seen[0] == pytest.approx(float(gradient @ change) / t, rel=1e-9)


def test_a_direction_that_does_not_descend_is_given_up() -> None:
    """Momentum may point upwards; nothing moves then, and the next step starts without it."""
    problem = CASES_BY_NAME["mlp"].make()
    optimizer = GramGaussNewton(
        problem.model, lam=1.0, alpha=1e3, damping_convention="sum", momentum=0.9, line_search="armijo"
    )
    optimizer.step(problem.closure)
    for param in problem.model.parameters():
        optimizer.state[param]["direction"].mul_(-1e3)
    before = problem.flat()
    info = optimizer.step(problem.closure)
    assert (info.given_up, info.rejected, info.step_norm) == (True, 1, 0.0)
    assert torch.equal(problem.flat(), before)
    assert not optimizer.step(problem.closure).given_up
    assert optimizer.counts["given_up"] == 1
