"""The engine that needs no samples: closures that do what they want with the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import Problem, flattened
from dense import Dense, relative_error
from torch import Tensor, nn
from torch.func import functional_call

from gramgn import GramGaussNewton

X, Y = torch.linspace(-1, 1, 12).reshape(6, 2).double(), torch.linspace(0, 1, 6).double()


class Several(nn.Module):
    """Takes a dict, returns a tuple and keeps a hidden state whose batch is in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(2, 3, batch_first=False), nn.Linear(3, 1)

    def forward(self, given: dict[str, Tensor], *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, hidden = self.cell(torch.stack([given["x"], given["x"] ** 2]))
        return self.last(outputs[-1]) * scale, {"hidden": hidden}


def twice(model: Callable[..., Any]) -> Tensor:
    return model({"x": X})[0][:, 0] * model({"x": X - 1}, scale=0.5)[0][:, 0] - Y


def part(model: Callable[..., Any]) -> Tensor:
    return model({"x": X})[1]["hidden"][0] - Y[:, None]


def penalised(model: Callable[..., Any]) -> Tensor:
    f, rest = model({"x": X})
    return torch.cat([f - Y[:, None], 0.1 * rest["hidden"][0]], dim=1)


def by_inputs(model: Callable[..., Any]) -> Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model({"x": x})[0].sum(), x, create_graph=True)
    return slope - X


@dataclass(frozen=True)
class Whole(Problem):
    """The closure's residuals as a function of the flat parameters."""

    closure_of: Callable[..., Tensor] = twice

    def residual_at(self, flat: Tensor) -> Tensor:
        state = dict(zip(self.trained().params, self.split(flat), strict=True))
        return self.closure_of(
            lambda *args, **kwargs: functional_call(self.model, state, args, kwargs)
        ).flatten()


@pytest.mark.parametrize("closure_of", [twice, part, penalised, by_inputs])
def test_steps_are_the_dense_ones(closure_of: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Several().double()
    twin = Whole(copy.deepcopy(model), (X,), lambda r: r, closure_of)
    options = {"lam": 1.0, "alpha": 0.1, "momentum": 0.9, "damping_convention": "mean"}
    optimizer, dense = GramGaussNewton(model, **options, engine="rows"), Dense(twin, [0] * 6, [options])
    start = dense.w
    for _ in range(2):
        info = optimizer.step(lambda: closure_of(model))
        dense.step()
    assert info.num_samples == 6
    assert relative_error(flattened(model.parameters()).detach(), dense.w.detach(), start) < 1e-9


class Unbatched(torch.autograd.Function):
    """Its backward pass cannot be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad if float(grad.sum()) else torch.zeros_like(grad)


def test_rows_that_cannot_be_batched_are_taken_one_by_one_and_that_is_reported_once() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    twin = copy.deepcopy(model)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine="rows")
    other = GramGaussNewton(twin, lam=1.0, alpha=0.1, engine="loop")
    with pytest.warns(RuntimeWarning, match="takes the rows one by one, as engine='loop' does"):
        optimizer.step(lambda: Unbatched.apply(model(X))[:, 0] - Y)
    other.step(lambda: twin(X)[:, 0] ** 2 - Y)
    optimizer.step(lambda: Unbatched.apply(model(X))[:, 0] - Y)
    other.step(lambda: twin(X)[:, 0] ** 2 - Y)
    assert torch.allclose(model.weight, twin.weight, rtol=1e-12)


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda model: model(X).sum(), "not a loss"),
        (lambda model: X, "do not depend on the model's output"),
        (lambda model: {"r": model(X)}, "must return the residuals as a tensor, got dict"),
    ],
)
def test_what_is_no_residual(closure: Callable[[nn.Module], Any], message: str) -> None:
    model = nn.Linear(2, 1).double()
    with pytest.raises(ValueError, match=message):
        GramGaussNewton(model, lam=1.0, alpha=0.1, engine="rows").step(lambda: closure(model))
