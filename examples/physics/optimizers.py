"""Three optimizers on the terms of a problem, with five settings each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from problem import Problem
from torch import Tensor, nn
from torch.func import vmap

from gramgn import GramGaussNewton, Term
from gramgn.optim import OneSample

Share = Callable[[], float]
"""Returns the share of the seconds that is spent."""
Take = Callable[[nn.Module, Problem, Share], Iterator[None]]
"""Takes a step, or a few, whenever it is asked for the next item."""


def ggn(model: nn.Module, problem: Problem, share: Share, *, alpha: float) -> Iterator[None]:
    """Take steps of Gram-Gauss-Newton with momentum and a line search."""
    optimizer = GramGaussNewton(model, lam=1.0, alpha=alpha, momentum=0.9, line_search="grid")
    while True:
        optimizer.step(terms=problem.draw())
        yield


def loss_of(model: nn.Module, terms: Sequence[Term]) -> Tensor:
    """Return the loss of terms, for optimizers that need nothing but its gradient."""
    u, loss = OneSample(model), torch.zeros(())
    for term in terms:
        r = vmap(partial(term.function, u))(*term.samples)
        loss = loss + term.weight * r.square().sum() / term.num_samples
    return loss


def adam(model: nn.Module, problem: Problem, share: Share, *, lr: float) -> Iterator[None]:
    """Take steps of Adam, whose step size falls to 0 as a cosine over the seconds."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    while True:
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * share())) / 2
        optimizer.zero_grad()
        loss_of(model, problem.draw()).backward()
        optimizer.step()
        yield


def lbfgs(model: nn.Module, problem: Problem, share: Share, *, redraw: int) -> Iterator[None]:
    """Take 20 steps of L-BFGS at a time, on points that are drawn again after `redraw` steps, with a new history."""
    while True:
        terms = problem.draw()
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            max_iter=20,
            history_size=50,
            line_search_fn="strong_wolfe",
            tolerance_grad=0.0,
            tolerance_change=0.0,
        )

        def closure(optimizer: torch.optim.Optimizer = optimizer, terms: Sequence[Term] = terms) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, terms)
            loss.backward()
            return loss

        for _ in range(redraw // 20):
            optimizer.step(closure)  # type: ignore[arg-type]
            yield


SETTINGS: dict[str, dict[str, Take]] = {
    "ggn": {f"alpha {alpha:g}": partial(ggn, alpha=alpha) for alpha in (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)},
    "adam": {f"lr {lr:g}": partial(adam, lr=lr) for lr in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)},
    "lbfgs": {f"points for {n} steps": partial(lbfgs, redraw=n) for n in (20, 60, 200, 1000, 5000)},
}
"""By optimizer and name; the best on the validation points of each problem is used."""
