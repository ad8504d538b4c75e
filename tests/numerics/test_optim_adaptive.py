"""Adaptive damping and line search: what is measured, what is decided, and that refused steps leave no trace."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from cases import CASES_BY_NAME, Problem
from dense import Dense
from torch import Tensor, nn

from gramgn import GramGaussNewton, StepInfo
from gramgn.optim import LevenbergMarquardt, Stream

ENGINES = ("stream", "vmap", "loop")


def loss_of(problem: Problem) -> float:
    with torch.no_grad():
        return float(problem.closure().square().mean())


class Scripted(nn.Module):
    """f = w, so J = I; the closure adds what a script says, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w[:, None] * x


def scripted(decreases: list[float], **options: Any) -> tuple[GramGaussNewton, StepInfo, list[Tensor]]:
    """Take one step on r = w (|w|^2 = 25, loss 12.5) where trial points lower the loss by what is given.

    Below 0, which more than 12.5 would be, the loss is NaN.
    """
    model = Scripted()
    x = torch.ones(2, 1, dtype=torch.float64)
    seen: list[Tensor] = []

    def closure() -> Tensor:
        seen.append(model.w.detach().clone())
        f = model(x)
        if len(seen) == 1:
            return f
        wanted = 12.5 - decreases[len(seen) - 2]
        return torch.full_like(f, math.sqrt(wanted) if wanted >= 0 else math.nan)

    options = {"lam": 1.0, "alpha": 1.0, **options}
    optimizer = GramGaussNewton(model, engine="loop", **{"damping_convention": "sum", **options})
    return optimizer, optimizer.step(closure), seen


# With alpha = 1 the step is d = -w / 2, and the predicted decrease 12.5 (1 - 1/4) = 9.375.
@pytest.mark.parametrize(
    ("decrease", "alpha"),
    [(9.0, 0.5), (7.1, 0.5), (7.0, 1.0), (2.4, 1.0), (2.3, 2.0), (0.1, 2.0)],
)
@pytest.mark.parametrize("reject", [False, True])
def test_alpha_follows_the_ratio(decrease: float, alpha: float, reject: bool) -> None:
    """A ratio above 3/4 lowers alpha, below 1/4 raises it; the step is taken as it was."""
    optimizer, info, seen = scripted([decrease], adaptive_damping=LevenbergMarquardt(reject=reject))
    assert optimizer.param_groups[0]["alpha"] == alpha
    assert info.predicted_decrease == pytest.approx(9.375)
    assert info.actual_decrease == pytest.approx(decrease)
    assert (info.alpha, info.rejected, info.given_up, len(seen)) == (1.0, 0, False, 2)
    assert torch.allclose(seen[1], torch.tensor([1.5, -2.0], dtype=torch.float64))
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), seen[1])


@pytest.mark.parametrize("worse", [-1.0, 13.0], ids=["rises", "not_finite"])
def test_steps_that_do_not_lower_the_loss_are_refused(worse: float) -> None:
    """The same G is solved again with alpha 2, then 4: d = -w / 3, -w / 5."""
    optimizer, info, seen = scripted([worse, 0.0, 1.5], adaptive_damping={"reject": True})
    w = seen[0]
    assert [round(float(trial[0] / w[0]), 12) for trial in seen] == [1.0, 0.5, round(2 / 3, 12), 0.8]
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), seen[3])
    assert (info.rejected, info.given_up, info.alpha, info.alpha_sum) == (2, False, 4.0, 4.0)
    # 12.5 (1 - 0.64) = 4.5 was predicted, a third of it came: alpha stays.
    assert info.predicted_decrease == pytest.approx(4.5)
    assert optimizer.param_groups[0]["alpha"] == 4.0
    assert (optimizer.counts["rejected"], optimizer.counts["given_up"]) == (2, 0)


@pytest.mark.parametrize("worse", [-1.0, 13.0], ids=["rises", "not_finite"])
def test_without_rejection_the_step_is_taken_and_alpha_raised(worse: float) -> None:
    optimizer, info, seen = scripted([worse], adaptive_damping={"reject": False})
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), seen[1])
    assert optimizer.param_groups[0]["alpha"] == 2.0
    assert (info.rejected, info.status) == (0, "cholesky")
    assert info.actual_decrease == pytest.approx(-1.0) or not math.isfinite(info.actual_decrease)


def test_a_step_that_is_given_up_leaves_the_parameters_bitwise() -> None:
    """G04's kind: counted, alpha stays raised, momentum forgets; no warning, and no divergence either."""
    optimizer, info, seen = scripted(
        [-1.0] * 3, adaptive_damping={"max_tries": 3, "factor": 4.0}, momentum=0.9
    )
    assert len(seen) == 4
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), seen[0])
    assert (info.rejected, info.given_up, info.status) == (3, True, "cholesky")
    assert (info.step_norm, info.lr, info.predicted_decrease, info.actual_decrease) == (0.0, 0.0, 0.0, 0.0)
    assert info.alpha == 16.0
    assert optimizer.param_groups[0]["alpha"] == 64.0
    assert optimizer.counts["given_up"] == 1
    assert optimizer.counts["rejected"] == 3
    assert not optimizer.state


def test_alpha_stays_between_its_limits() -> None:
    optimizer, _, _ = scripted([9.0], adaptive_damping={"min_alpha": 0.8})
    assert optimizer.param_groups[0]["alpha"] == 0.8
    optimizer, info, _ = scripted([1e-3], adaptive_damping={"max_alpha": 1.5})
    assert optimizer.param_groups[0]["alpha"] == 1.5
    # At the limit there is nothing more to try.
    optimizer, info, seen = scripted([-1.0] * 8, adaptive_damping={"max_alpha": 1.5})
    assert (info.rejected, info.given_up, len(seen)) == (2, True, 3)


def test_all_groups_follow_together_also_the_empty_one() -> None:
    problem = CASES_BY_NAME["mlp"].make()
    params = list(problem.model.parameters())
    groups = [{"params": []}, {"params": params[:2], "alpha": 1.0}, {"params": params[2:], "alpha": 3.0}]
    optimizer = GramGaussNewton(
        problem.model, groups, lam=1.0, alpha=0.5, damping_convention="sum", adaptive_damping={}
    )
    for _ in range(4):
        optimizer.step(problem.closure)
    first, second, third = (group["alpha"] for group in optimizer.param_groups)
    assert second != 1.0
    assert (second / first, third / second) == (2.0, 3.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.8, "lr": 0.7},
        {"weight_decay": 0.3, "damping_convention": "mean"},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"max_step_norm": 0.3, "damping_warmup_steps": 3},
        {"damping_convention": "trace", "lam": 0.7},
    ],
    ids=str,
)
def test_accepted_steps_are_the_dense_ones(options: dict[str, Any], engine: str) -> None:
    """Each accepted step is that of the alpha in the info; the decrease is measured at the point it leads to."""
    problem, twin = CASES_BY_NAME["mlp_three_outputs"].make(), CASES_BY_NAME["mlp_three_outputs"].make()
    given = {"lam": 1.0, "alpha": 0.05, **options}
    optimizer = GramGaussNewton(
        problem.model,
        **{"damping_convention": "sum", **given},
        adaptive_damping={"factor": 3.0},
        engine=engine,
    )
    dense = Dense(twin, [0] * 4, [given])
    start, alphas = dense.w, set()
    for _ in range(6):
        before = loss_of(problem)
        info = optimizer.step(problem.closure)
        alphas.add(optimizer.param_groups[0]["alpha"])
        if info.given_up:
            continue
        warmup = given.get("damping_warmup_steps", 0)
        left = warmup - dense.num_steps
        dense.options[0]["alpha"] = info.alpha / (10 ** (left / warmup) if left > 0 else 1)
        dense.step()
        assert float((problem.flat() - dense.w).norm() / (dense.w - start).norm()) < 1e-9
        if not options.get("decoupled_weight_decay"):
            assert info.actual_decrease == pytest.approx(before - loss_of(problem), abs=1e-12)
    assert len(alphas) > 1
    assert optimizer.counts["given_up"] == 0


@pytest.mark.parametrize("options", [{"adaptive_damping": {}}, {"line_search": "armijo"}])
def test_weight_decay_inside_the_solve_is_part_of_what_must_fall(options: dict[str, Any]) -> None:
    """At a minimum of the loss the decay's step raises the loss and lowers loss + penalty: it is taken."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    y = model(x).detach()
    before = model.weight.detach().clone()
    optimizer = GramGaussNewton(
        model, lam=1.0, alpha=0.1, damping_convention="sum", weight_decay=0.5, **options
    )
    info = optimizer.step(lambda: model(x) - y)
    assert info.actual_decrease < 0
    assert (info.rejected, info.given_up) == (0, False)
    assert float(model.weight.detach().norm()) < float(before.norm())
    # One step of the right length: 1/2 |r|^2 + wd/2 |w|^2 falls by what it says.
    if "adaptive_damping" in options:
        assert optimizer.param_groups[0]["alpha"] == 0.05


def random_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 1)).double()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"adaptive_damping": {}}, {"line_search": "armijo"}])
def test_trial_points_see_the_same_dropout(engine: str, options: dict[str, Any]) -> None:
    """G16: the closure's random numbers are the same in each call, and go on afterwards as after one call."""
    model, drawn = random_network(), []
    x, y = torch.randn(2, 8, 5, dtype=torch.float64)[0], torch.randn(8, 1, dtype=torch.float64)

    def closure() -> Tensor:
        f = model(x)
        drawn.append(torch.rand(1).item())
        return f - y

    optimizer = GramGaussNewton(
        model, lam=1.0, alpha=1.0, damping_convention="sum", lr=1e-6, engine=engine, **options
    )
    torch.manual_seed(5)
    info = optimizer.step(closure)
    after = torch.rand(1).item()
    # The loss is taken again where random numbers were drawn, since vmap draws other masks than the model.
    assert len(drawn) == 3
    assert drawn[1] == drawn[2]
    if engine != "vmap":
        assert drawn[0] == drawn[1]
        # So short a step changes the loss by 1e-6 of what other masks would.
        assert info.actual_decrease == pytest.approx(info.predicted_decrease, rel=1e-3)
    assert abs(info.actual_decrease) < 1e-4 * info.loss

    torch.manual_seed(5)
    plain = GramGaussNewton(model, lam=1.0, alpha=1.0, damping_convention="sum", lr=0.0, engine=engine)
    plain.step(closure)
    assert torch.rand(1).item() == after


def test_trial_points_leave_no_trace_in_the_random_numbers() -> None:
    """G16: a trial that draws more than the call before is not seen by what is drawn after the step."""
    problem, calls = CASES_BY_NAME["mlp"].make(), []

    def closure() -> Tensor:
        calls.append(torch.rand(len(calls) + 1))
        return problem.closure()

    optimizer = GramGaussNewton(
        problem.model, lam=1.0, alpha=1.0, damping_convention="sum", adaptive_damping={}
    )
    torch.manual_seed(5)
    optimizer.step(closure)
    after = torch.rand(3)
    assert len(calls) == 3
    torch.manual_seed(5)
    torch.rand(1)
    assert torch.equal(after, torch.rand(3))


class Stateful(nn.Module):
    """Divides by a running mean that each pass moves, before it is used, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.layer = nn.Linear(5, 1)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        moved = 0.9 * self.mean + 0.1 * x.abs().mean()
        if self.way == "in place":
            self.mean.copy_(moved)
        elif self.way == "by data":
            self.mean.data = self.mean.data.clone()
            self.mean.data.mul_(0).add_(moved)
        elif self.way == "replaced":
            self.mean = moved
        else:
            self.register_buffer(f"mean_{self.calls}", self.mean, persistent=False)
            self.mean = moved
        if self.way == "raises" and not torch.is_grad_enabled():
            raise KeyError("mine")
        return self.layer(x) / self.mean


@pytest.mark.parametrize("options", [{"adaptive_damping": {}}, {"line_search": "armijo"}])
@pytest.mark.parametrize("way", ["in place", "by data", "replaced", "added", "raises"])
def test_trial_points_leave_no_trace_in_buffers(way: str, options: dict[str, Any]) -> None:
    """Buffers and attributes are those after one pass, and every trial point sees those before it."""
    torch.manual_seed(0)
    model, x = Stateful(way).double(), torch.randn(8, 5, dtype=torch.float64)
    expected = copy.deepcopy(model)
    expected(x)
    optimizer = GramGaussNewton(
        model, lam=1.0, alpha=1e-3, damping_convention="sum", lr=1e-6, engine="stream", **options
    )
    if way == "raises":
        with pytest.raises(KeyError, match="mine"):
            optimizer.step(lambda: model(x) - 10)
    else:
        info = optimizer.step(lambda: model(x) - 10)
        # So short a step changes the loss by 1e-6 of what a moved mean would.
        assert info.actual_decrease == pytest.approx(info.predicted_decrease, rel=1e-3)
    assert model.calls == expected.calls == 1
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert {name: float(value) for name, value in model.named_buffers()} == {
        name: float(value) for name, value in expected.named_buffers()
    }


def test_a_predicted_increase_raises_alpha() -> None:
    """With lr > 2 lam the linear model itself overshoots: that both it and the loss rise is no agreement."""
    optimizer, info, _ = scripted([-20.0], adaptive_damping={"reject": False}, lam=0.5, lr=4.0)
    assert info.predicted_decrease < 0
    assert optimizer.param_groups[0]["alpha"] == 2.0


def test_nothing_is_adapted_or_refused_on_rounding() -> None:
    """At the minimum there is no decrease to speak of: the step is taken and alpha stays."""
    problem = CASES_BY_NAME["linear"].make()
    target = problem.model(*problem.args).detach()
    closure = lambda: problem.model(*problem.args) - target  # noqa: E731
    for options in ({"adaptive_damping": {}}, {"line_search": "armijo"}):
        optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, damping_convention="sum", **options)
        info = optimizer.step(closure)
        assert (info.rejected, info.given_up, optimizer.param_groups[0]["alpha"]) == (0, False, 0.3)


def test_a_jacobian_in_bfloat16_is_not_compared_with_a_loss_in_float32() -> None:
    """The loss that was seen under autocast errs by 1e-2; so short a step changes it by less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    x, y = torch.randn(8, 5), torch.randn(8, 1)
    for options in ({"adaptive_damping": {}}, {"line_search": "armijo"}):
        optimizer = GramGaussNewton(
            model, lam=1.0, alpha=1.0, lr=1e-3, engine=Stream(jacobian_dtype="bfloat16"), **options
        )
        with torch.no_grad():
            before = float((model(x) - y).double().square().mean())
        info = optimizer.step(lambda: model(x) - y)
        with torch.no_grad():
            after = float((model(x) - y).double().square().mean())
        assert info.actual_decrease == pytest.approx(before - after, rel=1e-6)
        assert info.loss != before
        assert not info.given_up


def test_an_error_at_a_trial_point_leaves_the_parameters_bitwise() -> None:
    problem = CASES_BY_NAME["mlp"].make()
    before, calls = problem.flat(), []

    def closure() -> Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise KeyError("mine")
        return problem.closure()

    pointers = [param.data_ptr() for param in problem.model.parameters()]
    optimizer = GramGaussNewton(
        problem.model, lam=1.0, alpha=0.3, damping_convention="sum", adaptive_damping={}
    )
    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    assert torch.equal(problem.flat(), before)
    assert [param.data_ptr() for param in problem.model.parameters()] == pointers
    assert optimizer.counts["steps"] == 0


def test_levenberg_marquardt_solves_rosenbrock_from_a_bad_start() -> None:
    """From (-1.2, 1), where f = (10 (v - u^2), 1 - u): every accepted step lowers the loss, down to rounding."""

    class Rosenbrock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.point = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            u, v = self.point
            return torch.stack([10 * (v - u**2), 1 - u])[None] * x

    for options in ({"adaptive_damping": {"factor": 3.0}}, {"line_search": "armijo"}):
        model = Rosenbrock()
        optimizer = GramGaussNewton(
            model, lam=1.0, alpha=0.1, damping_convention="sum", engine="loop", **options
        )
        x, losses = torch.ones(1, 1, dtype=torch.float64), []
        for _ in range(60):
            losses.append(optimizer.step(lambda model=model, x=x: model(x)).loss)
        assert all(later <= earlier for earlier, later in itertools.pairwise(losses))
        assert torch.allclose(model.point, torch.ones(2, dtype=torch.float64), atol=1e-6)
        assert optimizer.counts["rejected"] > 0


@pytest.mark.parametrize("options", [{"adaptive_damping": {}}, {"line_search": "armijo"}])
def test_with_cross_entropy(options: dict[str, Any]) -> None:
    """The loss that is measured is the mean cross-entropy, and its slope and model are the right ones."""
    problem = CASES_BY_NAME["mlp_three_outputs"].make()
    labels = torch.tensor([0, 2, 1, 1, 0, 2])
    loss = lambda: nn.functional.cross_entropy(problem.model(*problem.args), labels)  # noqa: E731
    optimizer = GramGaussNewton(
        problem.model, lam=1.0, alpha=0.1, damping_convention="sum", loss="cross_entropy", lr=1e-4, **options
    )
    before = float(loss().detach())
    info = optimizer.step(lambda: (problem.model(*problem.args), labels))
    assert info.actual_decrease == pytest.approx(before - float(loss().detach()), rel=1e-8)
    assert info.actual_decrease == pytest.approx(info.predicted_decrease, rel=1e-2)
    assert not info.given_up
