"""Every variant, alone and together, against the dense reference over several steps, whatever the engine."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cases import CASES_BY_NAME, Problem
from dense import Dense, relative_error, split_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn import GramGaussNewton, Stream

TOLERANCE = 1e-10
STEPS = 5
ENGINES = ("stream", "vmap", "loop")
PLAIN = {"lam": 1.0, "alpha": 0.5}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "paper": [{"lam": 1.0, "alpha": 0.3}],
    "lam_and_lr": [{"lam": 2.5, "alpha": 0.5, "lr": 0.7}],
    "momentum": [{**PLAIN, "momentum": 0.9}],
    "momentum_lam_lr": [{"lam": 0.6, "alpha": 0.8, "momentum": 0.5, "lr": 0.5}],
    "decay_inside": [{**PLAIN, "weight_decay": 0.1}],
    "decay_inside_alone": [{"lam": 1.0, "alpha": 0.0, "weight_decay": 0.7, "momentum": 0.9}],
    "decay_decoupled": [{**PLAIN, "weight_decay": 0.1, "decoupled_weight_decay": True, "lr": 0.5}],
    "momentum_and_decay_inside": [{"lam": 1.7, "alpha": 0.6, "momentum": 0.8, "weight_decay": 0.2, "lr": 0.6}],
    "momentum_and_decay_decoupled": [
        {**PLAIN, "momentum": 0.8, "weight_decay": 0.2, "decoupled_weight_decay": True}
    ],
    "step_norm": [{**PLAIN, "max_step_norm": 0.05}],
    "step_norm_momentum_decay": [{**PLAIN, "max_step_norm": 0.1, "momentum": 0.9, "weight_decay": 0.1}],
    "warmup": [{**PLAIN, "damping_warmup_steps": 3, "damping_warmup_factor": 20.0}],
    "warmup_momentum_decay": [
        {**PLAIN, "damping_warmup_steps": 4, "momentum": 0.7, "weight_decay": 0.05, "lr": 0.8}
    ],
    "groups_lr": [{**PLAIN, "lr": 1.0}, {**PLAIN, "lr": 0.2}],
    "groups_alpha": [PLAIN, {**PLAIN, "alpha": 5.0}, {**PLAIN, "alpha": 0.1}],
    "groups_lr_alpha_lam": [{"lam": 1.9, "alpha": 2.0, "lr": 0.3}, {"lam": 1.9, "alpha": 0.4}],
    "groups_momentum": [{**PLAIN, "momentum": 0.9}, {**PLAIN, "momentum": 0.9, "alpha": 2.0, "lr": 0.5}],
    "groups_momentum_decay": [
        {**PLAIN, "momentum": 0.9, "weight_decay": 0.0, "lr": 0.9},
        {**PLAIN, "momentum": 0.9, "weight_decay": 0.3, "alpha": 2.0, "lr": 0.5},
    ],
    "groups_decoupled_step_norm": [
        {**PLAIN, "weight_decay": 0.1, "decoupled_weight_decay": True, "max_step_norm": 0.1},
        {**PLAIN, "weight_decay": 0.3, "decoupled_weight_decay": True, "max_step_norm": 0.1, "lr": 0.5},
    ],
}  # fmt: skip


def run_both(
    problem: Problem, twin: Problem, options: list[dict[str, Any]], steps: int = STEPS, **fixed: Any
) -> tuple[GramGaussNewton, Dense, Tensor]:
    """Take steps with the optimizer on one problem, by the reference on its twin; return where both start."""
    groups, of_each = split_groups(problem, options)
    optimizer = GramGaussNewton(problem.model, groups, **{"damping_convention": "sum", **options[0]}, **fixed)
    dense = Dense(twin, of_each, options)
    start = dense.w
    for _ in range(steps):
        optimizer.step(problem.closure)
        dense.step()
    return optimizer, dense, start


@pytest.mark.parametrize(
    ("name", "convention", "engine"),
    [
        ("mlp", "mean", "stream"),
        *itertools.product(("mlp_three_outputs",), ("sum", "mean", "trace"), ("stream",)),
        ("mlp_three_outputs", "mean", "vmap"),
        ("mlp_three_outputs", "mean", "loop"),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_the_dense_ones(variant: str, name: str, convention: str, engine: str) -> None:
    """G14: groups of other lr, alpha and weight decay among them; G09's momentum as well."""
    options = [{**given, "damping_convention": convention} for given in VARIANTS[variant]]
    problem, twin = CASES_BY_NAME[name].make(), CASES_BY_NAME[name].make()
    _, dense, start = run_both(problem, twin, options, engine=engine)
    assert relative_error(problem.flat(), dense.w, start) < TOLERANCE


@pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", ["momentum_and_decay_inside", "groups_momentum_decay"])
@pytest.mark.parametrize(
    "name", ["mlp_one_sample", "tied_weights", "tokens", "mlp_curved", "convolutions", "frozen_parameters"]
)
def test_variants_on_other_networks(name: str, variant: str, engine: str) -> None:
    """G05, G06, G17: one sample, frozen and tied parameters with momentum and weight decay inside the solve."""
    problem, twin = CASES_BY_NAME[name].make(), CASES_BY_NAME[name].make()
    _, dense, start = run_both(problem, twin, VARIANTS[variant], engine=engine)
    assert relative_error(problem.flat(), dense.w, start) < 1e-9


@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_of_the_info_with_variants(variant: str) -> None:
    """predicted_decrease is that of the linear model along lr d; step_norm, lr and alpha are those taken."""
    problem = CASES_BY_NAME["mlp_three_outputs"].make()
    groups, of_each = split_groups(problem, VARIANTS[variant])
    optimizer = GramGaussNewton(
        problem.model, groups, **{"damping_convention": "sum", **VARIANTS[variant][0]}
    )
    dense = Dense(CASES_BY_NAME["mlp_three_outputs"].make(), of_each, VARIANTS[variant])
    for number in range(3):
        J, _, _ = dense.gradient_and_curvature()
        r, before = dense.problem.residual_at(dense.w), dense.w
        info = optimizer.step(problem.closure)
        dense.step()
        lr = dense.entries(lambda group: group.get("lr", 1.0))
        longest = VARIANTS[variant][0].get("max_step_norm") or math.inf
        change = lr * dense.d
        shorter = min(1.0, longest / float(change.norm()))
        change *= shorter
        if not VARIANTS[variant][0].get("decoupled_weight_decay"):
            assert torch.allclose(change, dense.w - before, rtol=1e-10, atol=1e-14)
        assert info.step_norm == pytest.approx(float(change.norm()), rel=1e-9)
        expected = float((r**2).mean() - ((r + J @ change) ** 2).mean())
        assert info.predicted_decrease == pytest.approx(expected, rel=1e-8, abs=1e-13)
        assert info.lr == pytest.approx(shorter * VARIANTS[variant][0].get("lr", 1.0), rel=1e-9)
        warmup = VARIANTS[variant][0].get("damping_warmup_steps", 0)
        factor = VARIANTS[variant][0].get("damping_warmup_factor", 10.0)
        warmed = factor ** (1 - number / warmup) if number < warmup else 1.0
        assert info.alpha == pytest.approx(warmed * VARIANTS[variant][0]["alpha"])
        assert math.isnan(info.actual_decrease)
        assert (info.rejected, info.given_up) == (0, False)


def network(sizes: list[int], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


numbers = st.floats(0.05, 5.0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 5),
    st.lists(st.tuples(numbers, st.floats(0.0, 1.0), st.floats(0.0, 1.5)), min_size=1, max_size=3),
    numbers,
    st.floats(0.0, 0.95),
    st.booleans(),
    st.sampled_from(["sum", "mean", "trace"]),
    st.sampled_from(ENGINES),
)
def test_any_network_and_groups(
    sizes: list[int],
    b: int,
    of_groups: list[tuple[float, float, float]],
    lam: float,
    momentum: float,
    decoupled: bool,
    convention: str,
    engine: str,
) -> None:
    """G05, G14: small random networks, batches, groups and values of everything that can vary."""
    shared = {
        "lam": lam, "momentum": momentum, "decoupled_weight_decay": decoupled, "damping_convention": convention
    }  # fmt: skip
    options = [{**shared, "alpha": a, "weight_decay": wd, "lr": lr} for a, wd, lr in of_groups]
    x = torch.randn(b, sizes[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    problem, twin = (Problem(network(sizes, 2), (x,), lambda f: f - 1.0) for _ in range(2))
    _, dense, start = run_both(problem, twin, options, steps=2, engine=engine)
    scale = float((dense.w - start).norm()) + 1e-3 * float(start.norm())
    assert float((problem.flat() - dense.w).norm()) < 1e-9 * scale


@settings(max_examples=25, deadline=None)
@given(numbers, numbers, st.floats(0.0, 0.9), st.floats(0.1, 2.0))
def test_lam_is_a_scale(lam: float, alpha: float, momentum: float, lr: float) -> None:
    """GGN(lam, alpha, lr) steps as GGN(1, alpha / lam, lr / lam): d scales by 1 / lam, momentum included."""
    ends = []
    for options in (
        {"lam": lam, "alpha": alpha, "lr": lr},
        {"lam": 1.0, "alpha": alpha / lam, "lr": lr / lam},
    ):
        problem = CASES_BY_NAME["mlp_three_outputs"].make()
        optimizer = GramGaussNewton(
            problem.model, momentum=momentum, **{"damping_convention": "sum", **options}
        )
        for _ in range(3):
            optimizer.step(problem.closure)
        ends.append(problem.flat())
    start = CASES_BY_NAME["mlp_three_outputs"].make().flat()
    assert relative_error(ends[0], ends[1], start) < 1e-8


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_trace_damping_does_not_see_the_scale_of_the_outputs(scale: float) -> None:
    """The step is the same in whatever unit the targets are: G and alpha grow together."""
    ends = []
    for unit in (1.0, scale):
        problem = CASES_BY_NAME["mlp"].make()
        optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.1, damping_convention="trace")
        for _ in range(3):
            info = optimizer.step(lambda unit=unit, problem=problem: unit * problem.closure())
            assert info.alpha_sum == pytest.approx(0.1 * info.trace / 6)
        ends.append(problem.flat())
    assert torch.allclose(*ends, rtol=1e-9, atol=1e-12)


def test_trace_damping_of_a_gram_matrix_of_zeros() -> None:
    """G07: no trace, no damping: the minimum-norm solution, which is 0; nothing moves and nothing is NaN."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False)).double()
    nn.init.zeros_(model[2].weight)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, damping_convention="trace", momentum=0.9)
    x = torch.zeros(5, 3, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="small eigenvalues of G"):
        info = optimizer.step(lambda: model(x) - 1.0)
    assert (info.status, info.step_norm, info.predicted_decrease) == ("minimum_norm", 0.0, 0.0)
    assert info.alpha_sum == 0.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_step_of_weight_decay_alone(decoupled: bool) -> None:
    """G14: with a residual of 0 the step is the decay alone; biases of a group without it stay as they are."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    groups = [{"params": [model.weight], "weight_decay": 0.2}, {"params": [model.bias]}]
    optimizer = GramGaussNewton(
        model, groups, lr=0.5, lam=1.0, alpha=0.3, damping_convention="sum", decoupled_weight_decay=decoupled
    )
    y = model(x).detach()
    info = optimizer.step(lambda: model(x) - y)
    if decoupled:
        assert torch.allclose(model.weight, (1 - 0.5 * 0.2) * before, rtol=1e-14)
        assert torch.equal(model.bias, bias)
        assert info.step_norm == 0.0
    else:
        # Ridge towards 0, held back by the outputs that it changes.
        A = torch.cat([x, torch.ones(3, 1, dtype=torch.float64)], dim=1)
        damping = torch.diag(torch.tensor([0.5] * 4 + [0.3], dtype=torch.float64))
        right = torch.cat([-0.2 * before[0], torch.zeros(1, dtype=torch.float64)])
        d = torch.linalg.solve(A.T @ A + damping, right)
        assert torch.allclose(model.weight[0], before[0] + 0.5 * d[:4], rtol=1e-12)
        assert info.step_norm == pytest.approx(0.5 * float(d.norm()), rel=1e-10)


def test_an_empty_group_changes_nothing() -> None:
    """G14: also one that is empty because it was frozen, and also in front; its values are not looked at."""
    ends = []
    for kind in ("none", "empty", "frozen"):
        problem = CASES_BY_NAME["mlp"].make()
        params = list(problem.model.parameters())
        if kind != "none":
            frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
            problem.model.register_parameter("idle", frozen)
        first = {"none": [], "empty": [{"params": []}], "frozen": [{"params": [frozen], "alpha": 0.0}]}[kind] \
            if kind != "none" else []  # fmt: skip
        optimizer = GramGaussNewton(
            problem.model, [*first, {"params": params}], lam=1.0, alpha=0.5, momentum=0.9, weight_decay=0.1
        )
        infos = [optimizer.step(problem.closure) for _ in range(3)]
        assert infos[-1].alpha == 0.5
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_without_any_damping_there_is_no_momentum() -> None:
    """With alpha = wd = 0 nothing pulls the step anywhere, so it is the minimum-norm one; d is kept all the same."""
    ends = []
    for momentum in (0.0, 0.9):
        problem = CASES_BY_NAME["mlp_weighted"].make()
        optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.0, momentum=momentum)
        for _ in range(3):
            info = optimizer.step(problem.closure)
        assert info.status == "minimum_norm"
        assert len(optimizer.state) == (4 if momentum else 0)
        ends.append(problem.flat())
    assert torch.allclose(*ends, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "kind", [Stream(chunk_size=2), Stream(chunk_size="auto"), Stream(memory_budget="least")], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"adaptive_damping": {"factor": 5.0}, "alpha": 1e-4},
        {"line_search": "armijo", "alpha": 1e-4},
    ],
    ids=str,
)
def test_variants_with_the_options_of_the_stream_engine(options: dict[str, Any], kind: Stream) -> None:
    """G02: chunks, and J pulled through a graph that trial points leave as it was, take the same steps."""
    ends = []
    for engine in ("loop", kind):
        problem = CASES_BY_NAME["mlp_curved"].make()
        optimizer = GramGaussNewton(
            problem.model, **{"damping_convention": "sum", **PLAIN, **options}, engine=engine
        )
        for _ in range(5):
            optimizer.step(problem.closure)
        ends.append(problem.flat())
    assert torch.allclose(*ends, rtol=1e-9, atol=1e-10)
