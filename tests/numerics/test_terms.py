"""Steps on terms against a dense reference: autograd's Jacobian of all residuals, stacked sample by sample.

The reference scales rows as the mean convention is defined, by sqrt(weight / samples), with alpha next to their Gram
matrix; the optimizer's own scale differs by a factor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES_BY_NAME, Problem, flattened
from dense import Dense, relative_error, split_groups
from test_optim_variants import PLAIN, VARIANTS
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp

from gramgn import GramGaussNewton, Loop, Stream, Term, Vmap
from gramgn.optim import Grid, LevenbergMarquardt, OneSample
from gramgn.physics import divergence, gradient, laplacian

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Mechanics:
    """What a network of this table returns: a dataclass that torch does not know."""

    energy: Tensor
    pressure: Tensor


class Atoms(nn.Module):
    """Energy and pressure of a set of points, as a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1, 2)

    def forward(self, positions: Tensor) -> Mechanics:
        away = (positions[:, :, None] - positions[:, None]).square().sum(-1, keepdim=True)
        both = self.net(away).sum(dim=(1, 2))
        return Mechanics(both[:, 0], both[:, 1])


class Operator(nn.Module):
    """Two branches, called with a dict, that return a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(3, 4), mlp(2, 4)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Any]:
        product = (self.branch(given["data"]) * self.trunk(given["place"])).sum(dim=1)
        return {"u": product, "both": (product, product[:, None] ** 2)}

    def scaled(self, data: Tensor, *, factor: float) -> Tensor:
        return factor * self.branch(data)


class Inverse(nn.Module):
    """A network with a coefficient that is recovered from data, a list of coefficients, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2)
        self.coefficient = nn.Parameter(torch.tensor(0.5))
        self.more = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))])
        self.register_buffer("offset", torch.tensor(0.3))

    def squared(self) -> Tensor:
        return self.more[0] ** 2

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Columns(nn.Module):
    """Joins the columns of a batch, so that it cannot be called with a sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, t], dim=1))[:, 0]


class Attention(nn.Module):
    """Points that attend to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x)[0]).mean(1)


def mlp(inputs: int, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def pair() -> nn.Module:
    return nn.ModuleDict({"flow": mlp(2, 2), "pressure": mlp(2)})


def several() -> nn.Module:
    return nn.ModuleList([mlp(2), mlp(2)])


def points(b: int = 4, d: int = 2) -> Tensor:
    return torch.rand(b, d, dtype=torch.float64)


def poisson(u: Any, x: Tensor) -> Tensor:
    return laplacian(u, x) + torch.sin(x).sum()


def value(u: Any, x: Tensor, g: Tensor) -> Tensor:
    return u(x) - g


def stokes(u: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return laplacian(u.flow, x) - gradient(u.pressure, x), divergence(u["flow"], x)


def stream_function(u: Any, x: Tensor) -> dict[str, Tensor]:
    """Navier-Stokes for a stream function: third derivatives, in forward mode twice over reverse mode."""

    def velocity(x: Tensor) -> Tensor:
        along = gradient(lambda x: u(x)[0], x)
        return torch.stack([along[1], -along[0]])

    inertia = jacrev(velocity)(x) @ velocity(x)
    return {"momentum": inertia + gradient(u, x)[1] - laplacian(velocity, x), "mass": divergence(velocity, x)}


def forces(u: Any, sample: dict[str, Tensor]) -> dict[str, Tensor]:
    def energy(positions: Tensor) -> Tensor:
        return u(positions).energy

    return {
        "energy": energy(sample["at"]) - sample["energy"],
        "pressure": u(sample["at"]).pressure,
        "forces": (grad(energy)(sample["at"]) + sample["at"]).flatten(),
    }


def operator(u: Any, data: Tensor, place: Tensor) -> Tensor:
    slope = grad(lambda place: u({"data": data, "place": place})["u"])(place)
    both = u({"data": data, "place": place})["both"]
    return slope.sum() + both[0] - both[1][0] + u.scaled(data, factor=0.5).sum()


def slopes(u: Any, x: Tensor) -> Tensor:
    return laplacian(lambda x: gradient(u, x)[0], x)


def inverse(u: Any, x: Tensor) -> Tensor:
    hess = hessian(lambda x: u.net(x)[0])(x)
    return u.coefficient * hess[0, 0] + (u.squared() * hess[1]).sum() * u.more[1] + u.offset


def heat(u: Any, x: Tensor, t: Tensor) -> Tensor:
    along = jvp(lambda t: u(x, t), (t,), (torch.ones_like(t),))[1]
    return along - jacrev(jacrev(u))(x, t).squeeze() + u(x, 0 * t)


def many(u: Any, x: Tensor) -> Tensor:
    return torch.sin(torch.arange(1.0, 40.0).to(x) * u(x))


def ensemble(u: Any, x: Tensor) -> Tensor:
    return sum(net(x) ** (i + 1) for i, net in enumerate(u)) - len(u) + laplacian(u[1], x)


def penalty(u: Any, x: Tensor) -> Tensor:
    return torch.relu(-u(x) - 100.0)


@dataclass(frozen=True)
class TermCase:
    """A network and the terms of a step on it."""

    name: str
    build: Callable[[], nn.Module]
    terms: Callable[[], list[Term]]


CASES = (
    TermCase("one", lambda: mlp(2), lambda: [Term(poisson, points())]),
    TermCase(
        "poisson", lambda: mlp(2),
        lambda: [Term(poisson, points(5)), Term(value, points(3), points(3, 1), weight=10.0)],
    ),
    TermCase("stokes", pair, lambda: [Term(stokes, points(3)), Term(lambda u, x: u.pressure(x), points(2))]),
    TermCase("stream_function", lambda: mlp(2, 2), lambda: [Term(stream_function, points(3))]),
    TermCase(
        "forces", Atoms,
        lambda: [Term(forces, {"at": torch.rand(3, 3, 2).double(), "energy": torch.rand(3).double()})],
    ),
    TermCase("operator", Operator, lambda: [Term(operator, points(4, 3), points(4), weight=0.3)]),
    TermCase("inverse", Inverse, lambda: [Term(inverse, points(4)), Term(value, points(2), points(2, 1))]),
    TermCase("attention", Attention, lambda: [Term(slopes, torch.rand(2, 3, 4).double())]),
    TermCase("heat", Columns, lambda: [Term(heat, points(4, 1), points(4, 1))]),
    TermCase("more_outputs_than_parameters", lambda: mlp(2), lambda: [Term(many, points(2))]),
    TermCase("ensemble", several, lambda: [Term(ensemble, points(4))]),
    TermCase("inactive", lambda: mlp(2), lambda: [Term(poisson, points(3)), Term(penalty, points(2))]),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


class Stacked(Problem):
    """All residuals of terms as a function of the flat parameters, in the scale that alpha is next to."""

    def __init__(self, model: nn.Module, terms: list[Term], convention: str) -> None:
        super().__init__(model, (torch.empty(1),), lambda r: r)
        self.terms, self.convention = terms, convention

    def residual_at(self, flat: Tensor) -> Tensor:
        state = dict(zip(self.trained().params, self.split(flat), strict=True))
        rows = []
        for term in self.terms:
            scale = math.sqrt(term.weight / (1 if self.convention == "sum" else len(tensors_of(term)[0])))
            rows += [scale * r for r in residuals_of(self.model, state, term)]
        return torch.cat(rows)

    def objective(self, flat: Tensor) -> float:
        return float(self.residual_at(flat).square().sum())


def tensors_of(term: Term) -> list[Tensor]:
    return [t for arg in term.samples for t in (arg.values() if isinstance(arg, dict) else [arg])]


def residuals_of(model: nn.Module, state: dict[str, Tensor], term: Term) -> list[Tensor]:
    """Return the residuals of each sample, by a loop and plain autograd."""

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *sample: Any) -> Any:
            return term.function(OneSample(self.model), *sample)

    found = []
    for i in range(len(tensors_of(term)[0])):
        sample = [
            {key: t[i] for key, t in arg.items()} if isinstance(arg, dict) else arg[i] for arg in term.samples
        ]
        given = {f"model.{name}": param for name, param in state.items()}
        r = functional_call(Called(), given, tuple(sample))
        parts = list(r.values()) if isinstance(r, dict) else list(r) if isinstance(r, tuple) else [r]
        found.append(torch.cat([part.flatten() for part in parts]))
    return found


def made(case: TermCase) -> tuple[nn.Module, list[Term]]:
    torch.manual_seed(1)
    model = case.build().double()
    return model, case.terms()


def both(
    case: TermCase, options: list[dict[str, Any]], convention: str, **fixed: Any
) -> tuple[GramGaussNewton, Dense, list[Term]]:
    model, terms = made(case)
    stacked = Stacked(copy.deepcopy(model), terms, convention)
    groups, of_each = split_groups(Stacked(model, terms, convention), options)
    options = [{**given, "damping_convention": convention} for given in options]
    optimizer = GramGaussNewton(model, groups, **options[0], **fixed)
    return optimizer, Dense(stacked, of_each, options), terms


def where(optimizer: GramGaussNewton) -> Tensor:
    return flattened(param.detach() for param in optimizer._model.parameters())


@pytest.mark.parametrize("convention", ["mean", "sum", "trace"])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_case_in_every_convention(name: str, convention: str) -> None:
    optimizer, dense, terms = both(BY_NAME[name], [{"lam": 1.3, "alpha": 0.2}], convention)
    start = dense.w
    for _ in range(2):
        info = optimizer.step(terms=terms)
        dense.step()
    assert relative_error(where(optimizer), dense.w, start) < TOLERANCE
    assert info.num_samples == sum(each.num_samples for each in info.terms)


@pytest.mark.parametrize("convention", ["mean", "sum", "trace"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option(variant: str, convention: str) -> None:
    optimizer, dense, _ = both(BY_NAME["poisson"], VARIANTS[variant], convention)
    start = dense.w
    for seed in range(4):
        # Momentum goes through points that are drawn anew.
        torch.manual_seed(seed)
        terms = BY_NAME["poisson"].terms()
        dense.problem.terms = terms  # type: ignore[attr-defined]
        optimizer.step(terms=terms)
        dense.step()
    assert relative_error(where(optimizer), dense.w, start) < TOLERANCE


@pytest.mark.parametrize("engine", [Loop(), Vmap(chunk_size=2), Stream(chunk_size=1), "vmap"])
@pytest.mark.parametrize("name", ["stokes", "forces", "more_outputs_than_parameters", "inverse"])
def test_engines_and_chunks(name: str, engine: Any) -> None:
    optimizer, dense, terms = both(BY_NAME[name], [PLAIN], "mean", engine=engine)
    start = dense.w
    optimizer.step(terms=terms)
    dense.step()
    assert relative_error(where(optimizer), dense.w, start) < TOLERANCE


@pytest.mark.parametrize("convention", ["mean", "sum", "trace"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_one_term_of_weight_1_is_the_closure(outputs: int, convention: str) -> None:
    torch.manual_seed(0)
    model = mlp(2, outputs).double()
    twin = copy.deepcopy(model)
    x, y = points(6), points(6, outputs)
    options = {
        "lam": 1.0,
        "alpha": 0.1,
        "damping_convention": convention,
        "momentum": 0.9,
        "weight_decay": 0.1,
    }
    one, other = GramGaussNewton(model, **options), GramGaussNewton(twin, **options)
    for _ in range(2):
        a, b = one.step(terms=Term(value, x, y)), other.step(lambda: twin(x) - y)
        for name in ("loss", "alpha_sum", "step_norm", "predicted_decrease", "trace", "lr", "num_samples"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9), name
        assert torch.allclose(a.gram, b.gram, rtol=1e-10, atol=1e-12)
        assert torch.allclose(a.terms[0].residual, b.residual, rtol=1e-10, atol=1e-12)
    assert relative_error(where(one), where(other), torch.zeros(())) < 1e-12


@pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")
@pytest.mark.parametrize("engine", ["stream", "vmap", "rows", Stream(chunk_size=2)])
@pytest.mark.parametrize(
    "name", ["mlp_three_outputs", "mlp_fewer_residuals", "tokens", "convolutions", "functional_parameters"]
)
def test_closures_among_the_terms(name: str, engine: Any) -> None:
    """They go through the optimizer's engine, and weigh what a function of their samples weighs."""
    problem, twin = CASES_BY_NAME[name].make(), CASES_BY_NAME[name].make()
    x = problem.args[0][:2]

    def penalty(u: Any, x: Tensor) -> Tensor:
        return 0.1 * u.norm.weight if name == "tokens" else u(x).flatten()[0] ** 2

    class Both(Problem):
        def residual_at(self, flat: Tensor) -> Tensor:
            state = dict(zip(self.trained().params, self.split(flat), strict=True))
            of_closure = math.sqrt(3.0 / len(self.args[0])) * super().residual_at(flat)
            rows = residuals_of(self.model, state, Term(penalty, x))
            return torch.cat([math.sqrt(0.5 / 2) * torch.cat(rows), of_closure])

    options = {"lam": 1.2, "alpha": 0.1, "momentum": 0.9, "damping_convention": "mean"}
    optimizer = GramGaussNewton(problem.model, **options, engine=engine)
    both = Both(twin.model, twin.args, twin.residual)
    start = both.flat()
    J, r = torch.autograd.functional.jacobian(both.residual_at, start), both.residual_at(start)
    d = torch.linalg.solve(1.2 * J.T @ J + 0.1 * torch.eye(len(start)).double(), -J.T @ r)
    info = optimizer.step(terms=[Term(penalty, x, weight=0.5), Term(problem.closure, weight=3.0)])
    assert relative_error(problem.flat(), start + d, start) < TOLERANCE
    assert info.terms[1].num_samples == len(problem.args[0])
    assert info.loss == pytest.approx(0.5 * info.terms[0].loss + 3 * info.terms[1].loss)


def test_closures_and_line_searches() -> None:
    problem, twin = CASES_BY_NAME["mlp_curved"].make(), CASES_BY_NAME["mlp_curved"].make()
    options = {"lam": 1.0, "alpha": 0.01, "momentum": 0.9, "line_search": "grid"}
    one, other = GramGaussNewton(problem.model, **options), GramGaussNewton(twin.model, **options)
    for _ in range(3):
        a, b = one.step(terms=Term(problem.closure)), other.step(twin.closure)
        assert (a.lr, a.loss) == (b.lr, pytest.approx(b.loss))
    assert torch.allclose(problem.flat(), twin.flat(), rtol=1e-9)


def test_loss_and_statistics_of_each_term() -> None:
    model, terms = made(BY_NAME["stokes"])
    terms = [
        Term(partial(stokes), points(3), weight=0.5),
        Term(lambda u, x: u.pressure(x).squeeze(), points(2), weight=4.0),
    ]
    state = {name: param.detach() for name, param in model.named_parameters()}
    rows = [torch.stack(residuals_of(model, state, term)) for term in terms]
    info = GramGaussNewton(model, lam=1.0, alpha=0.1).step(terms=terms)
    first, second = info.terms
    assert first.residual.shape == (3, 3)
    assert second.residual.shape == (2,)
    assert torch.allclose(first.residual, rows[0])
    assert torch.allclose(second.residual, rows[1][:, 0])
    assert first.loss == pytest.approx(float(rows[0].square().mean()))
    assert info.loss == pytest.approx(0.5 * first.loss + 4 * second.loss)
    assert (first.weight, first.num_samples, first.name) == (0.5, 3, "stokes")
    assert torch.equal(info.gram, info.gram.T)
    assert first.spectrum()[1] == pytest.approx(float(torch.linalg.eigvalsh(info.gram[:9, :9])[-1]))
    assert second.spectrum()[1] == pytest.approx(float(torch.linalg.eigvalsh(info.gram[9:, 9:])[-1]))
    assert info.spectrum()[1] >= max(first.spectrum()[1], second.spectrum()[1])


def test_grid_takes_the_best_of_the_step_sizes() -> None:
    """And momentum goes on from the part of the step that was taken."""
    options = [{"lam": 1.0, "alpha": 1e-4, "momentum": 0.9}]
    optimizer, dense, terms = both(
        BY_NAME["poisson"], options, "mean", line_search=Grid(shrink=0.3, num_tries=6)
    )
    for _ in range(4):
        start = dense.w
        dense.step()
        sizes = [0.0, *(0.3**i for i in range(6))]
        values = [dense.problem.objective(start + t * dense.d) for t in sizes]  # type: ignore[attr-defined]
        t = sizes[values.index(min(values))]
        dense.w, dense.d = start + t * dense.d, t * dense.d
        info = optimizer.step(terms=terms)
        assert info.lr == pytest.approx(t)
        assert info.actual_decrease == pytest.approx(values[0] - min(values), rel=1e-6)
        assert info.rejected <= sizes.index(t) + 1  # no shorter steps after two that are worse
        assert relative_error(where(optimizer), dense.w, start) < 1e-7


def test_adaptive_damping_follows_the_ratio() -> None:
    rule = LevenbergMarquardt(factor=3.0, reject=False)
    optimizer, dense, terms = both(
        BY_NAME["poisson"], [{"lam": 1.0, "alpha": 0.5}], "mean", adaptive_damping=rule
    )
    stacked = dense.problem
    start = dense.w
    J, r = torch.autograd.functional.jacobian(stacked.residual_at, start), stacked.residual_at(start)
    dense.step()
    actual = stacked.objective(start) - stacked.objective(dense.w)  # type: ignore[attr-defined]
    predicted = float(r.square().sum() - (r + J @ dense.d).square().sum())
    info = optimizer.step(terms=terms)
    assert info.actual_decrease == pytest.approx(actual, rel=1e-8)
    assert info.predicted_decrease == pytest.approx(predicted, rel=1e-8)
    ratio = actual / predicted
    factor = 1 / 3 if ratio > 0.75 else 3.0 if ratio < 0.25 else 1.0
    assert optimizer.param_groups[0]["alpha"] == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("fixed", [{"line_search": "grid"}, {"line_search": "armijo"}, {}])
def test_resumes_to_the_bit(fixed: dict[str, Any]) -> None:
    options = [{**PLAIN, "momentum": 0.9, "weight_decay": 0.1}]
    optimizer, _, terms = both(BY_NAME["inverse"], options, "mean", **fixed)
    optimizer.step(terms=terms)
    model = copy.deepcopy(optimizer._model)
    resumed = GramGaussNewton(model, **options[0], **fixed)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, resumed, copied):
        each.step(terms=terms)
    assert torch.equal(where(optimizer), where(resumed))
    assert torch.equal(where(optimizer), where(copied))


def test_random_numbers_are_the_same_at_trial_points() -> None:
    """The masks of dropout differ between samples and not between the points that a line search compares."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    seen: list[Tensor] = []

    def residual(u: Any, x: Tensor) -> Tensor:
        return u(x) - torch.rand(()).to(x)

    optimizer = GramGaussNewton(model, lam=1.0, alpha=1e9, line_search="grid")
    info = optimizer.step(terms=Term(residual, torch.ones(6, 2).double()))
    seen.append(info.terms[0].residual)
    assert len(set(seen[0].flatten().tolist())) == 6
    # With a step of this size the loss changes in the sixth digit at most, and by far more with other masks.
    assert 0 < info.actual_decrease < 1e-6 * info.loss
    assert info.actual_decrease == pytest.approx(info.predicted_decrease, rel=1e-4)


def test_float32_and_mixed_precision_of_parameters() -> None:
    model, terms = made(BY_NAME["poisson"])
    twin = copy.deepcopy(model).float()
    shorter = [Term(t.function, *(x.float() for x in t.samples), weight=t.weight) for t in terms]
    GramGaussNewton(model, lam=1.0, alpha=0.1, momentum=0.9).step(terms=terms)
    GramGaussNewton(twin, lam=1.0, alpha=0.1, momentum=0.9).step(terms=shorter)
    assert flattened(twin.parameters()).dtype == torch.float32
    assert torch.allclose(flattened(twin.parameters()).double(), flattened(model.parameters()), atol=1e-5)


def test_the_model_itself_may_be_called() -> None:
    """A function that calls the model by its own name is differentiated all the same."""
    torch.manual_seed(0)
    model = mlp(2).double()
    twin = copy.deepcopy(model)
    x = points(5)
    GramGaussNewton(model, lam=1.0, alpha=0.1).step(terms=Term(lambda u, x: laplacian(model, x), x))
    GramGaussNewton(twin, lam=1.0, alpha=0.1).step(terms=Term(lambda u, x: laplacian(u, x), x))
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-12)


def test_fused_attention_is_differentiated_twice_in_each_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 1))
    term, found = Term(lambda u, x: laplacian(lambda x: u(x).sum(), x), torch.rand(2, 3, 4).double()), []
    for engine in ("stream", "rows"):
        twin = copy.deepcopy(model).double()
        GramGaussNewton(twin, lam=1.0, alpha=0.1, engine=engine).step(terms=term)
        found.append(flattened(twin.parameters()))
    assert torch.allclose(*found, rtol=1e-9)


def test_calls_without_tensors_are_the_models_own() -> None:
    model = Inverse()
    assert torch.equal(OneSample(model).squared(), model.squared())


def test_frozen_parameters_and_parameters_of_no_group_stay() -> None:
    model, terms = made(BY_NAME["poisson"])
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    GramGaussNewton(model, [model[0].weight], lam=1.0, alpha=0.1).step(terms=terms)
    changed = [name for name, param in model.state_dict().items() if not torch.equal(param, before[name])]
    assert changed == ["0.weight"]


def test_groups_that_have_nothing_to_train() -> None:
    model, terms = made(BY_NAME["poisson"])
    model[0].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    groups = [{"params": [model[0].weight]}, {"params": [model[2].weight, model[0].bias, model[2].bias]}]
    GramGaussNewton(model, groups, lam=1.0, alpha=0.1).step(terms=terms)
    GramGaussNewton(twin, lam=1.0, alpha=0.1).step(terms=terms)
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-10)


@pytest.mark.parametrize("engine", ["stream", "rows"])
def test_a_term_of_weight_0_counts_as_samples_alone(engine: str) -> None:
    """In the sum convention it changes nothing; its statistics are reported all the same."""
    model, terms = made(BY_NAME["poisson"])
    twin = copy.deepcopy(model)
    options = {"lam": 1.0, "alpha": 0.1, "damping_convention": "sum", "engine": engine}
    idle = Term(lambda u, x: {"twice": 2 * u(x), "once": (u(x),)}, points(3), weight=0)
    info = GramGaussNewton(model, **options).step(terms=[idle, *terms])
    GramGaussNewton(twin, **options).step(terms=terms)
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-10)
    assert info.terms[0].loss > 0
    assert info.terms[0].residual.shape == (3, 2)
    assert info.terms[0].spectrum() == (0.0, 0.0)


def test_samples_of_other_kinds() -> None:
    """Whole numbers as indices, truth values, lists, and entries that are no tensors."""
    model, _ = made(BY_NAME["one"])
    twin, x = copy.deepcopy(model), points(5)
    above = x[:, 0] > 0.5

    def residual(u: Any, i: Tensor, given: list[Any]) -> Tensor:
        return torch.where(given[0], u(x[i]), 2 * u(x[i])) + given[1]

    def plain(u: Any, x: Tensor, above: Tensor) -> Tensor:
        return u(x) * (2 - above.to(x)) + 3

    GramGaussNewton(model, lam=1.0, alpha=0.1).step(terms=Term(residual, torch.arange(5), [above, 3]))
    GramGaussNewton(twin, lam=1.0, alpha=0.1).step(terms=Term(plain, x, above))
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-10)


def test_nan_moves_nothing() -> None:
    model, _ = made(BY_NAME["poisson"])
    before = flattened(model.parameters()).clone()
    with pytest.warns(RuntimeWarning, match="not finite"):
        info = GramGaussNewton(model, lam=1.0, alpha=0.1).step(
            terms=Term(lambda u, x: u(x) / (x[0] - x[0]), points())
        )
    assert info.status == "non_finite"
    assert torch.equal(flattened(model.parameters()), before)


def test_buffers_that_forward_counts_in() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.net(x)

    model = Counting().double()
    with pytest.raises(ValueError, match="assigns the buffers calls"):
        GramGaussNewton(model, lam=1.0, alpha=0.1).step(terms=Term(lambda u, x: u(x), points()))


class Identity(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 1 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Clipped(Identity):
    """Its backward pass is no derivative."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.5, 0.5)


class WrongForwardMode(Identity):
    """Its derivative in forward mode is twice that in reverse mode."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent


class Counted:
    """A residual that changes from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, u: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * u(x)


@pytest.mark.parametrize("engine", ["stream", "rows"])
@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda u, x: Clipped.apply(3 * u(x)), "the Jacobian of the terms is not autograd's"),
        (Counted(), "residuals of a term differ between two calls"),
    ],
    ids=["clipped", "counted"],
)
def test_terms_whose_jacobian_is_wrong_are_rejected(residual: Any, message: str, engine: str) -> None:
    model, _ = made(BY_NAME["one"])
    before = flattened(model.parameters()).clone()
    with pytest.raises(ValueError, match=message):
        GramGaussNewton(model, lam=1.0, alpha=0.1, engine=engine).step(
            terms=[Term(poisson, points()), Term(residual, points())]
        )
    assert torch.equal(flattened(model.parameters()), before)


def test_a_wrong_derivative_in_forward_mode_is_noticed() -> None:
    model, _ = made(BY_NAME["one"])

    def more_than_parameters(u: Any, x: Tensor) -> Tensor:
        return WrongForwardMode.apply(many(u, x))

    with pytest.raises(ValueError, match=r"is not autograd's \(relative error 1e\+00\).*engine='rows'"):
        GramGaussNewton(model, lam=1.0, alpha=0.1).step(terms=Term(more_than_parameters, points()))
    step = GramGaussNewton(model, lam=1.0, alpha=0.1, engine="rows").step
    assert step(terms=Term(more_than_parameters, points())).status == "cholesky"


def test_a_comparison_leaves_no_trace() -> None:
    """The third step is compared in a resumed run only: the same parameters and random numbers follow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    options = {"lam": 1.0, "alpha": 0.1, "momentum": 0.9}
    optimizer, term = GramGaussNewton(model, **options), Term(value, points(), points(4, 1))
    for _ in range(2):
        optimizer.step(terms=term)
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    resumed = GramGaussNewton(twin, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step(terms=term)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    resumed.step(terms=term)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(flattened(model.parameters()), flattened(twin.parameters()))


def by_autograd(u: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(u(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("search", [None, "grid"])
def test_functions_that_differentiate_by_autograd(search: str | None) -> None:
    """One sample after the other they may; torch.func maps over its own derivatives only."""
    model, _ = made(BY_NAME["one"])
    twin, x = copy.deepcopy(model), points()
    options = {"lam": 1.0, "alpha": 0.1, "line_search": search}
    GramGaussNewton(model, **options, engine="rows").step(terms=Term(by_autograd, x))
    GramGaussNewton(twin, **options).step(terms=Term(lambda u, x: gradient(u, x), x))
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*one backward pass per row:RuntimeWarning")
def test_closures_among_the_terms_that_differentiate() -> None:
    """By inputs, with a line search, next to a term of samples."""
    model, _ = made(BY_NAME["one"])
    twin, x, y = copy.deepcopy(model), points(), points(3)

    def slopes() -> Tensor:
        given = x.clone().requires_grad_()
        return torch.autograd.grad(model(given).sum(), given, create_graph=True)[0]

    options = {"lam": 1.0, "alpha": 1e-3, "line_search": "grid"}
    one, other = GramGaussNewton(model, **options), GramGaussNewton(twin, **options)
    for _ in range(2):
        one.step(terms=[Term(poisson, y), Term(slopes)])
        other.step(terms=[Term(poisson, y), Term(lambda u, x: gradient(u, x), x)])
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-8)
