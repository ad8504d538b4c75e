"""Closures that do more than subtract targets, in every engine: the dense step, or a sentence that says what works."""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from cases import Problem, flattened
from dense import Dense, relative_error
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from gramgn import GramGaussNewton, Stream

X = torch.linspace(-1, 2, 12).sin().reshape(6, 2).double()
Y = torch.linspace(0, 1, 6).double()[:, None]


@dataclass(frozen=True)
class Given:
    """Arguments that torch does not know."""

    x: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Both:
    """Outputs that torch does not know."""

    f: Tensor
    h: Tensor
    note: str = "kept"


class Named(NamedTuple):
    """Outputs with names."""

    f: Tensor
    h: Tensor


class Net(nn.Module):
    """Takes and returns its tensors in many ways."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.returns = nn.Linear(2, 3), nn.Linear(3, 2), returns

    def forward(self, x: Any = None, *, scale: float = 1.0, other: Tensor | None = None) -> Any:
        if isinstance(x, (dict, UserDict)):
            x = x["x"]
        if isinstance(x, Given):
            x = x.x * x.scale
        h = torch.tanh(self.a(x if other is None else x + other))
        return self.returns(self.b(h) * scale, h)


Model = Callable[..., Any]


def slopes(u: Model, **options: Any) -> Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(u(x)[:, 0].sum(), x, create_graph=True, **options)
    return slope


def laplacian(u: Model) -> Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(u(x)[:, 0].sum(), x, create_graph=True)
    return sum(
        torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i : i + 1] for i in range(2)
    )


def dual(u: Model) -> Tensor:
    with forward_ad.dual_level():
        both = forward_ad.unpack_dual(u(forward_ad.make_dual(X, torch.ones_like(X))))
        return both.primal + both.tangent - Y


def forward_mode(u: Model) -> Tensor:
    return jvp(u, (X,), (torch.ones_like(X),))[1] - Y


def in_place(u: Model) -> Tensor:
    return u(X).sub_(Y).mul_(2)


def parts_of_one_another(u: Model) -> Tensor:
    f, h = u(X)
    return torch.cat([f * h[:, :1], h - Y], dim=1)


def on_its_outputs(u: Model) -> Tensor:
    f = u(X)
    return u(f) - f - Y


def target_network(u: Model) -> Tensor:
    with torch.no_grad():
        target = u(X + 1)
    return u(X) - target


@dataclass(frozen=True)
class Closure:
    """Residuals of a network, and the engines that form their J; the others name those that do."""

    residual: Callable[[Model], Tensor]
    engines: str = "stream vmap chunks rows loop"
    returns: Callable[[Tensor, Tensor], Any] = lambda f, h: f
    by_rows: bool = False  # whether the default engine takes rows, and reports it


BY_GRAPH = "stream rows loop"
BY_SAMPLE = "stream vmap rows loop"
CLOSURES = {
    "slopes": Closure(slopes, BY_GRAPH, by_rows=True),
    "slopes_unused": Closure(lambda u: slopes(u, allow_unused=True) + u(X) - Y, BY_GRAPH, by_rows=True),
    "slopes_materialized": Closure(lambda u: slopes(u, materialize_grads=True), BY_GRAPH, by_rows=True),
    "laplacian": Closure(laplacian, BY_GRAPH, by_rows=True),
    "forward_mode": Closure(forward_mode, BY_GRAPH, by_rows=True),
    "dual": Closure(dual, BY_GRAPH, by_rows=True),
    "vmap": Closure(lambda u: vmap(lambda x: u(x[None])[0])(X) - Y, BY_GRAPH, by_rows=True),
    "jacrev": Closure(
        lambda u: vmap(jacrev(lambda x: u(x[None])[0]))(X).flatten(1), BY_GRAPH, by_rows=True
    ),
    "hessian": Closure(
        lambda u: vmap(hessian(lambda x: u(x[None])[0, 0]))(X).sum(dim=(1, 2)), BY_GRAPH, by_rows=True
    ),
    "inputs_that_require_gradients": Closure(lambda u: u(X.clone().requires_grad_()) - Y),
    "two_calls": Closure(lambda u: (u(X) - u(X + 1)).square().sum(dim=1), BY_SAMPLE),
    "target_network": Closure(target_network),
    "twice": Closure(lambda u: u(u(X)) - Y, BY_GRAPH),
    "on_its_outputs": Closure(on_its_outputs, BY_GRAPH, by_rows=True),
    "tuple": Closure(lambda u: u(X)[0] - Y, BY_SAMPLE, lambda f, h: (f, h)),
    "parts_of_one_another": Closure(parts_of_one_another, BY_SAMPLE, lambda f, h: (f, h)),
    "dict": Closure(
        lambda u: u(X)["f"] * u(X)["rest"][0][:, :1], BY_SAMPLE, lambda f, h: {"f": f, "rest": (h, "no tensor")}
    ),
    "dataclass": Closure(lambda u: u(X).f - u(X).h[:, :2], BY_SAMPLE, Both),
    "named_tuple": Closure(lambda u: u(X).f - Y, BY_SAMPLE, Named),
    "ignored_hidden_state": Closure(lambda u: u(X)[0] - Y, BY_GRAPH, lambda f, h: (f, h[None])),
    "hidden_state": Closure(
        lambda u: u(X)[1][0] - Y, BY_GRAPH, lambda f, h: (f, h[None]), by_rows=True
    ),
    "keywords": Closure(lambda u: u(x=X, scale=2.0, other=X.flip(1)) - Y),
    "dict_of_inputs": Closure(lambda u: u({"x": X}) - Y),
    "user_dict_of_inputs": Closure(lambda u: u(UserDict(x=X)) - Y),
    "dataclass_of_inputs": Closure(lambda u: u(Given(X, 2.0)) - Y),
    "more_columns": Closure(lambda u: torch.cat([u(X) - Y, 0.1 * u(X)], dim=1), BY_SAMPLE),
    "more_columns_of_one_call": Closure(lambda u: (lambda f: torch.cat([f - Y, f.square()], dim=1))(u(X))),
    "in_place": Closure(in_place),
    "mixing": Closure(lambda u: (lambda f: f - f.mean(dim=0))(u(X)), BY_GRAPH, by_rows=True),
    "penalty": Closure(lambda u: torch.cat([u(X)[:, 0] - 1, 0.1 * u(X[:2]).flatten()]), "rows"),
    "part_of_the_batch": Closure(lambda u: u(X)[:4] - Y[:4], "rows"),
}  # fmt: skip


@dataclass(frozen=True)
class Whole(Problem):
    """The closure's residuals as a function of the flat parameters."""

    closure_of: Callable[[Model], Tensor] = laplacian

    def residual_at(self, flat: Tensor) -> Tensor:
        state = dict(zip(self.trained().params, self.split(flat), strict=True))
        return self.closure_of(
            lambda *args, **kwargs: functional_call(self.model, state, args, kwargs)
        ).flatten()


@contextlib.contextmanager
def reported(expected: bool, match: str) -> Iterator[None]:
    if not expected:
        yield
        return
    with pytest.warns(RuntimeWarning, match=match) as caught:
        yield
    assert sum("one backward pass per row" in str(each.message) for each in caught) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("engine", ["stream", "vmap", "chunks", "rows", "loop"])
@pytest.mark.parametrize("name", CLOSURES)
def test_every_closure_in_every_engine(name: str, engine: str) -> None:
    """Three steps with momentum, some of which are compared with autograd."""
    closure = CLOSURES[name]
    torch.manual_seed(0)
    model = Net(closure.returns).double()
    dense_options = {"lam": 1.0, "alpha": 0.1, "momentum": 0.9, "damping_convention": "sum"}
    twin = Whole(copy.deepcopy(model), (X,), lambda r: r, closure.residual)
    dense = Dense(twin, [0] * 4, [dense_options])
    optimizer = GramGaussNewton(
        model, **dense_options, engine=Stream(chunk_size=4) if engine == "chunks" else engine
    )
    start = dense.w
    if engine not in closure.engines.split():
        with pytest.raises(ValueError, match=r"engine='(rows|stream)'|leave (chunk_size|it) out"):
            optimizer.step(lambda: closure.residual(model))
        assert torch.equal(flattened(model.parameters()), start)
        return
    with reported(closure.by_rows and engine == "stream", "as with engine='rows'"):
        for _ in range(3):
            optimizer.step(lambda: closure.residual(model))
            dense.step()
    assert relative_error(flattened(model.parameters()).detach(), dense.w.detach(), start.detach()) < 1e-9


@pytest.mark.parametrize("engine", ["stream", "vmap", "rows", "loop"])
@pytest.mark.parametrize("scale", [1, 2])
def test_functional_call(scale: int, engine: str) -> None:
    """With the model's own parameters it is an ordinary call; with others, J goes through these."""
    torch.manual_seed(0)
    model = Net(lambda f, h: f).double()

    def residual(u: nn.Module) -> Tensor:
        own = dict(u.named_parameters())
        given = own if scale == 1 else {name: scale * param for name, param in own.items()}
        return functional_call(u, given, (X,)) - Y

    def plain(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in model.parameters()])
        pairs = zip(model.named_parameters(), parts, strict=True)
        return functional_call(model, {name: scale * v.view_as(p) for (name, p), v in pairs}, (X,)) - Y

    start = flattened(model.parameters()).detach()
    J = torch.autograd.functional.jacobian(plain, start).reshape(12, -1)
    d = torch.linalg.solve(J.T @ J + 0.1 * torch.eye(len(start)).double(), -J.T @ plain(start).flatten())
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, damping_convention="sum", engine=engine)
    if scale == 2 and engine == "vmap":
        with pytest.raises(ValueError, match=r"as functional_call does: .*engine='rows'"):
            optimizer.step(lambda: residual(model))
        return
    with reported(scale == 2 and engine == "stream", "as functional_call does"):
        optimizer.step(lambda: residual(model))
    assert relative_error(flattened(model.parameters()).detach(), start + d, start) < 1e-9


@pytest.mark.filterwarnings("ignore:.*one backward pass per row:RuntimeWarning")
@pytest.mark.parametrize("name", ["slopes", "jacrev", "two_calls", "parts_of_one_another"])
def test_line_searches_of_every_closure(name: str) -> None:
    """Trial points differentiate by inputs too."""
    closure = CLOSURES[name]
    steps = []
    for engine in ("stream", "rows"):
        torch.manual_seed(0)
        model = Net(closure.returns).double()
        optimizer = GramGaussNewton(model, lam=1.0, alpha=1e-3, engine=engine, line_search="grid")
        infos = [optimizer.step(lambda model=model: closure.residual(model)) for _ in range(2)]
        assert infos[0].loss - infos[0].actual_decrease == pytest.approx(infos[1].loss)
        steps.append(flattened(model.parameters()).detach())
    assert torch.allclose(*steps, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*one backward pass per row:RuntimeWarning")
def test_derivatives_that_a_later_step_asks_for() -> None:
    """After ordinary steps, the default engine takes rows in the step that needs it, and returns to streaming."""
    torch.manual_seed(0)
    model = Net(lambda f, h: f).double()
    twin = copy.deepcopy(model)
    optimizer, other = (
        GramGaussNewton(each, lam=1.0, alpha=0.1, engine=engine)
        for each, engine in ((model, "stream"), (twin, "rows"))
    )
    for number in range(6):
        for each, own in ((optimizer, model), (other, twin)):
            each.step(lambda own=own, number=number: slopes(own) if number == 3 else own(X) - Y)
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-9)


class Mixing(nn.Module):
    """Normalises by the statistics of the batch, by torch's function or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.a, self.b, self.by_hand = nn.Linear(2, 3), nn.Linear(3, 1), by_hand

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.by_hand:
            return self.b(nn.functional.batch_norm(h, None, None, training=True))[:, 0]
        return self.b(h - h.mean(dim=0))[:, 0]


@pytest.mark.parametrize("engine", ["stream", "vmap", "rows", "loop"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_networks_that_mix_samples(by_hand: bool, engine: str) -> None:
    """G01: rejected in all engines; what mixes by hand is left to the oracle, which differentiates the whole batch."""
    torch.manual_seed(0)
    model = Mixing(by_hand).double()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine=engine)
    if by_hand and engine == "loop":
        assert optimizer.step(lambda: model(X) - Y[:, 0]).status == "cholesky"
        return
    before = flattened(model.parameters()).clone()
    with pytest.raises(
        ValueError,
        match=r"statistics of the batch|within a batch|is not autograd's|more than 1 value per channel",
    ):
        optimizer.step(lambda: model(X) - Y[:, 0])
    assert torch.equal(flattened(model.parameters()), before)


def test_rows_of_what_is_no_mixing() -> None:
    """Normalisation inside of samples, dropout, and a tensor as long as the batch that all samples share."""
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, affine=True)
            self.drop, self.b = nn.Dropout(0.5), nn.Linear(4, 1)

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            h = self.norm(self.a(torch.stack([x, x**2], dim=2))).square().mean(dim=2)
            return self.b(self.drop(h))[:, 0] * shared.sum()

    model = Shared().double()
    state = torch.get_rng_state()
    info = GramGaussNewton(model, lam=1.0, alpha=0.1, engine="rows").step(lambda: model(X, Y[:, 0]))
    assert info.status == "cholesky"
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    model(X, Y[:, 0])
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("residual", [lambda u: u(X)[:, :1] - Y[:, 0], lambda u: 0.5 * (u(X)[:, 0] - Y)])
@pytest.mark.parametrize("engine", ["stream", "vmap", "rows", "loop"])
def test_broadcasting(residual: Callable[[Model], Tensor], engine: str) -> None:
    """T01: [b, 1] minus [b] in every engine."""
    model = Net(lambda f, h: f).double()
    with pytest.raises(ValueError, match="probably have shapes that broadcast"):
        GramGaussNewton(model, lam=1.0, alpha=0.1, engine=engine).step(lambda: residual(model))


def test_gradients_by_parameters_stay_those_of_the_whole_graph() -> None:
    """torch.func over the parameters, inside of the closure."""
    torch.manual_seed(0)
    model = Net(lambda f, h: f).double()
    twin = copy.deepcopy(model)

    def residual(u: nn.Module) -> Tensor:
        own = dict(u.named_parameters())
        return vmap(grad(lambda x: functional_call(u, own, (x[None],))[0, 0]))(X)

    for each, engine in ((model, "rows"), (twin, "loop")):
        GramGaussNewton(each, lam=1.0, alpha=0.1, engine=engine).step(lambda each=each: residual(each))
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-10)


class Inner(nn.Module):
    """Has parameters of its own, for which there is no rule."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.randn(2, 3)), wrap

    def forward(self, x: Any) -> Any:
        x = x.x if isinstance(x, Given) else x["x"] if isinstance(x, UserDict) else x
        return self.wrap(torch.tanh(x @ self.weight) + self.weight.sum())


@pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")
@pytest.mark.parametrize("wrap", [Given, lambda f: UserDict(x=f)])
def test_modules_without_a_rule_that_pass_dataclasses(wrap: Callable[[Tensor], Any]) -> None:
    """To one another, and out of the network."""
    torch.manual_seed(0)
    model = nn.Sequential(Inner(wrap), Inner(wrap)).double()
    model[1].weight = nn.Parameter(torch.randn(3, 2).double())
    twin = copy.deepcopy(model)

    def residual(u: nn.Module) -> Tensor:
        returned = u(wrap(X))
        return (returned.x if isinstance(returned, Given) else returned["x"]) - Y

    for each, engine in ((model, "stream"), (twin, "loop")):
        GramGaussNewton(each, lam=1.0, alpha=0.1, engine=engine).step(lambda each=each: residual(each))
    assert torch.allclose(flattened(model.parameters()), flattened(twin.parameters()), rtol=1e-10)
