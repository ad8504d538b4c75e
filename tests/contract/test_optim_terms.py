"""What is said of terms that cannot be stepped on; nothing moves then."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

from gramgn import GramGaussNewton, Stream, Term
from gramgn.optim import OneSample

OUTSIDE = nn.Parameter(torch.ones(1))
X = torch.linspace(-1, 1, 12).reshape(6, 2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def built(model: nn.Module, **options: Any) -> GramGaussNewton:
    return GramGaussNewton(model, **{"lam": 1.0, "alpha": 0.3, **options})


def value(u: Any, x: Tensor) -> Tensor:
    return u(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Term(value, 3.0), "term 'value' needs tensors"),
        (lambda: Term(value, torch.ones(())), "got [[]]"),
        (lambda: Term(value, X, X[:3]), "got [[6, 2], [3, 2]]"),
        (lambda: Term(value, X[:0]), "term 'value' has no samples, got [[0, 2]]: leave it out of this step"),
        (
            lambda: Term(value, X, weight=-1.0),
            "the weight of term 'value' must be a finite number >= 0, got -1.0",
        ),
        (lambda: Term(value, X, weight=float("nan")), "the weight of term 'value' must be a finite number"),
        (
            lambda: Term(network(), X),
            "must be a function (u, *sample) that returns residuals, got Sequential",
        ),
        (lambda: Term(X, value), "must be a function (u, *sample) that returns residuals, got Tensor"),
    ],
)
def test_terms_that_cannot_be(make: Callable[[], Term], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda u, x: "a", "must return real numbers that depend on the model through autograd, got str"),
        (lambda u, x: u(x) > 0, "got torch.bool"),
        (lambda u, x: u(x).to(torch.complex64), "got torch.complex64"),
        (lambda u, x: (), "returned nothing"),
        (lambda u, x: x, "does not depend on the model's parameters"),
        (lambda u, x: 1.0, "does not depend on the model's parameters"),
        (lambda u, x: u(x).detach() - 1, "does not depend on the model's parameters"),
        (lambda u, x: hessian(u[0])(x).sum() - 1, "differentiate it to zero"),
        (lambda u, x: u(x) * OUTSIDE, "depends on tensors that require gradients"),
    ],
)
def test_residuals_that_cannot_be(residual: Callable[..., Any], message: str) -> None:
    model = network()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=re.escape(message)):
        built(model).step(terms=[Term(value, X), Term(residual, X)])
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "step needs either a closure or terms, got neither"),
        ({"closure": lambda: None, "terms": [Term(value, X)]}, "got both"),
        ({"closure": Term(value, X)}, "got Term: step(closure) or step(terms=[Term(residual, x), ...])"),
        (
            {"terms": []},
            "terms must be one or several of gramgn.Term, as in step(terms=[Term(residual, x)]), got none",
        ),
        ({"terms": [value]}, "got function"),
        ({"terms": 3}, "terms must be one or several of gramgn.Term"),
    ],
)
def test_steps_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        built(network()).step(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cross_entropy"}, "terms are residuals of least squares"),
        ({"engine": Stream(memory_budget="least")}, "with terms J is held"),
        ({"engine": Stream(jacobian_dtype="bfloat16")}, "with terms J is held"),
    ],
)
def test_options_that_terms_do_not_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(network(), **options).step(terms=Term(value, X))


def test_an_output_without_the_batch_is_explained() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).sum()

    with pytest.raises(ValueError, match=re.escape("u(x) = model(x[None])[0]")):
        built(Total()).step(terms=Term(value, X))


def test_what_vmap_cannot_run_is_left_to_the_loop() -> None:
    def branching(u: Any, x: Tensor) -> Tensor:
        return u(x) if float(x[0]) > 0 else 2 * u(x)

    with pytest.raises(RuntimeError) as caught:
        built(network()).step(terms=Term(branching, X))
    assert "engine='rows'" in "".join(caught.value.__notes__)
    info = built(network(), engine="rows").step(terms=Term(branching, X))
    assert info.status == "cholesky"


def test_optimizers_that_took_such_steps_can_be_pickled() -> None:
    model = network()
    optimizer = built(model)
    optimizer.step(terms=Term(lambda u, x: u(x), X))
    again = pickle.loads(pickle.dumps((model, optimizer)))
    for each in (optimizer, again[1]):
        each.step(terms=Term(value, X))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again[0].parameters(), strict=True))


def test_one_sample_behaves_like_the_module() -> None:
    nets = nn.ModuleDict({"a": network(), "b": network()})
    u, x = OneSample(nets), X[0]
    assert list(u) == ["a", "b"]
    assert len(u) == 2
    assert "a" in u
    assert [net(x).item() for net in u.values()] == [net(x[None]).item() for net in nets.values()]
    assert [name for name, _ in u.items()] == ["a", "b"]
    assert torch.equal(u.a[0].weight, nets["a"][0].weight)
    assert torch.equal(u["b"][0](x), nets["b"][0](x[None])[0])
    assert repr(u).startswith("OneSample(ModuleDict(")
    with pytest.raises(AttributeError):
        _ = u.absent
