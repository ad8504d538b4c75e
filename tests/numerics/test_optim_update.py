"""How a step reaches the parameters: unseen where that is safe, else formed, looked at and added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import CASES_BY_NAME, Problem
from dense import split_groups
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.optim import BlockLinearisation
from gramgn.optim.stream import StreamLinearisation

ENGINES = ("stream", "vmap", "loop")


@pytest.fixture
def directions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note each time that d is formed: J^T u is added to other tensors than the parameters."""
    formed: list[int] = []
    for kind in (BlockLinearisation, StreamLinearisation):

        def spying(self: Any, out: Any, *args: Any, original: Any = kind.add_vjp_) -> None:
            if not isinstance(out[0], nn.Parameter):
                formed.append(1)
            original(self, out, *args)

        monkeypatch.setattr(kind, "add_vjp_", spying)
    return formed


def end(
    options: Sequence[dict[str, Any]], name: str = "mlp_three_outputs", **fixed: Any
) -> tuple[Tensor, Any]:
    problem = CASES_BY_NAME[name].make()
    groups, _ = split_groups(problem, options)
    optimizer = GramGaussNewton(problem.model, groups, **{"damping_convention": "sum", **options[0]}, **fixed)
    infos = [optimizer.step(problem.closure) for _ in range(3)]
    return problem.flat(), infos[-1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        [{"lam": 1.0, "alpha": 0.3}],
        [{"lam": 2.0, "alpha": 0.3, "lr": 0.7, "max_step_norm": 0.1}],
        [{"lam": 1.0, "alpha": 0.3, "lr": 0.7}, {"lam": 1.0, "alpha": 3.0, "lr": 0.1}],
    ],
)
def test_unseen_and_formed_steps_are_the_same(
    options: list[dict[str, Any]], engine: str, directions: list[int]
) -> None:
    """The plain step needs no vector of size m; its norm, from u^T G u, is that of the vector."""
    unseen, info = end(options, engine=engine)
    assert directions == []
    # Momentum keeps d, but so little of it changes nothing.
    formed, other = end(options, engine=engine, momentum=1e-300)
    assert len(directions) == 3
    assert torch.allclose(unseen, formed, rtol=1e-12, atol=1e-13)
    assert info.step_norm == pytest.approx(other.step_norm, rel=1e-9)
    assert info.predicted_decrease == pytest.approx(other.predicted_decrease, rel=1e-9)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"adaptive_damping": {}}, {"line_search": "armijo"}]
)
def test_d_is_formed_where_something_needs_it(options: dict[str, Any], directions: list[int]) -> None:
    end([{"lam": 1.0, "alpha": 0.3}], **options)
    assert len(directions) == 3


def test_d_is_formed_where_the_small_eigenvalues_are_rounding(directions: list[int]) -> None:
    """The norm from u^T G u would be rounding too."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1e4, 0.0], [1e4, 1e-2]])
    before = model.weight.detach().clone()
    with pytest.warns(RuntimeWarning, match="small eigenvalues"):
        info = GramGaussNewton(model, lam=1.0, alpha=1e-3, damping_convention="sum").step(
            lambda: model(x) - torch.tensor([[0.0], [1.0]])
        )
    assert info.ill_conditioned
    assert len(directions) == 1
    assert info.step_norm == pytest.approx(float((model.weight.detach() - before).norm()), rel=1e-4)


def sum_of_weights(**options: Any) -> tuple[nn.Module, GramGaussNewton, Tensor]:
    """Return f = w1 + w2 from w = 0, in float32."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return (
        model,
        GramGaussNewton(model, **{"lam": 1.0, "alpha": 1.0, "damping_convention": "sum", **options}),
        torch.ones(1, 2),
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("gain", "target", "formed"), [(1.0, 1e15, False), (1.0, 1e25, True), (1e10, 1e35, True)]
)
def test_a_gigantic_step_that_fits_is_taken(
    gain: float, target: float, formed: bool, engine: str, directions: list[int]
) -> None:
    """The step is w1 = w2; where its square, or a bound on it, overflows, d is formed and its norm scaled."""
    model, optimizer, x = sum_of_weights(engine=engine)
    info = optimizer.step(lambda: model(gain * x) - target)
    expected = target * gain / (2 * gain**2 + 1)
    assert info.status in ("cholesky", "minimum_norm")
    assert not info.ill_conditioned
    assert torch.allclose(model.weight, torch.full_like(model.weight, expected))
    assert info.step_norm == pytest.approx(2**0.5 * expected, rel=1e-6)
    assert len(directions) == formed


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"weight_decay": 1e-3}, {"adaptive_damping": {}}, {"line_search": "armijo"},
     {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    ids=str,
)  # fmt: skip
def test_a_step_that_does_not_fit_changes_nothing(options: dict[str, Any], engine: str) -> None:
    """G04: d = 1e30 fits float32, lr d = 1e40 does not; parameters and the last direction stay bitwise."""
    model, optimizer, x = sum_of_weights(engine=engine, **options)
    optimizer.step(lambda: model(x) - 1.0)
    before = model.weight.detach().clone()
    kept = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    assert bool(kept) == ("momentum" in options)
    optimizer.param_groups[0]["lr"] = 1e20
    alpha = optimizer.param_groups[0]["alpha"]
    with pytest.warns(RuntimeWarning, match="this step changed no parameter"):
        info = optimizer.step(lambda: model(x) - 1e30)
    assert (info.status, info.step_norm, info.lr, info.given_up) == ("non_finite", 0.0, 0.0, False)
    assert info.predicted_decrease != info.predicted_decrease
    assert torch.equal(model.weight, before)
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in kept.items())
    assert optimizer.param_groups[0]["alpha"] == alpha
    optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer.step(lambda: model(x) - 1.0).status == "cholesky"


@pytest.mark.parametrize("options", [{"momentum": 0.9, "weight_decay": 0.1}, {"adaptive_damping": {}}])
def test_a_nan_among_the_residuals_keeps_momentum(options: dict[str, Any]) -> None:
    """G04: one bad batch is stepped over, as if it had not been."""
    ends = []
    for bad in (False, True):
        problem: Problem = CASES_BY_NAME["mlp"].make()
        optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, damping_convention="sum", **options)
        optimizer.step(problem.closure)
        if bad:
            with pytest.warns(RuntimeWarning, match="not finite"):
                optimizer.step(lambda problem=problem: problem.closure() * torch.nan)
        optimizer.step(problem.closure)
        ends.append(problem.flat())
    assert torch.equal(*ends)


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1e-3, "momentum": 0.9, "weight_decay": 1e-3},
        {"alpha": 1e-3, "damping_convention": "trace"},
        {"alpha": 1e-3, "adaptive_damping": {}},
        {"alpha": 1e-3, "line_search": "armijo"},
        {"alpha": 0.0},
        {"alpha": 0.0, "weight_decay": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["duplicates", "zero", "scaled", "wide"])
def test_the_adversarial_set_with_variants(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """G03: duplicates with opposite targets, a zero image, 1e4-scaled inputs, eigenvalues over ten decades."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x, y = torch.randn(6, 6, dtype=dtype), torch.randn(6, 1, dtype=dtype)
    if kind == "duplicates":
        x[1], y[:2] = x[0], torch.tensor([[1.0], [-1.0]])
    elif kind == "zero":
        x[2] = 0
    elif kind == "scaled":
        x *= 1e4
    else:
        x *= torch.logspace(-1.5, 3.5, 6, dtype=dtype)[:, None]
    optimizer = GramGaussNewton(model, lam=1.0, **options)
    start = optimizer.step(lambda: model(x) - y).loss
    for _ in range(5):
        info = optimizer.step(lambda: model(x) - y)
        assert info.status in ("cholesky", "eigh", "minimum_norm")
        assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
    if "adaptive_damping" in options or "line_search" in options:
        assert info.loss <= start


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"adaptive_damping": {}}], ids=str)
def test_a_profiler_sees_solve_and_update(options: dict[str, Any]) -> None:
    problem = CASES_BY_NAME["mlp"].make()
    optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, damping_convention="sum", **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        optimizer.step(problem.closure)
    names = {event.key for event in profiled.key_averages()}
    assert {"gramgn.forward", "gramgn.backward", "gramgn.solve", "gramgn.update"} <= names
