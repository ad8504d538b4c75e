"""What the loss would be at another point, on the same mini-batch and with the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gramgn.optim._system import Step, System
from gramgn.optim._vectors import by_group, inner_products, norms
from gramgn.optim.closure import Closure
from gramgn.optim.losses import Loss, modelled_decrease
from gramgn.optim.runtime import RandomState, drew_random_numbers, random_state, set_random_state

# Differences of the loss below so many roundings of it say nothing.
ROUNDINGS = 16


class Trial:
    """Calls the closure again with the parameters moved for the length of the call.

    They are moved by exchanging their memory, so that they are bitwise as before afterwards, and no graph that
    saved them notices. The model runs as it is, once on the whole batch.

    Args:
        closure: The user's.
        loss: Reads what it returns.
        system: The linear model of the batch.
        before: The state of the random numbers when the closure was called to linearise.
    """

    def __init__(self, closure: Closure, loss: Loss, system: System, before: RandomState) -> None:
        self.closure, self.loss, self.system, self.random = closure, loss, system, before
        self.device = system.params[0].device
        residual = system.J.reading.residual
        is_random = drew_random_numbers(before, self.device)
        self.eps = torch.finfo(residual.dtype).eps
        # An engine may draw other masks than the plain model, or run it in a shorter format: then the loss it
        # saw cannot be compared, and the plain model's is taken at this point too.
        comparable = not is_random and system.J.eps <= self.eps
        self.start = float(system.J.reading.loss) if comparable else self._evaluate()

    @property
    def noise(self) -> float:
        """Differences of the loss up to here are rounding."""
        return ROUNDINGS * self.eps * abs(self.start)

    def decrease(self, step: Step, fraction: float) -> float:
        """Return how far the loss falls by a fraction of the step; not finite where the loss is not."""
        assert step.direction is not None, "trial points need the direction"
        groups = self.system.trained.groups
        with _moved(self.system.params, step.direction, [fraction * step.lr[group] for group in groups]):
            return self.start - self._evaluate()

    def _evaluate(self) -> float:
        after = random_state(self.device)
        set_random_state(self.random, self.device)
        try:
            with torch.no_grad():
                return self.loss.value(self.closure())
        finally:
            set_random_state(after, self.device)


@contextmanager
def _moved(params: Sequence[Tensor], direction: Sequence[Tensor], lr: Sequence[float]) -> Iterator[None]:
    own = [param.data for param in params]
    try:
        for param, d, length in zip(params, direction, lr, strict=True):
            param.data = param.data.add(d, alpha=length)
        yield
    finally:
        for param, data in zip(params, own, strict=True):
            param.data = data


class Line:
    """What is minimised, along a step: the loss and the penalty of weight decay inside of the solve.

    The penalty 1/2 wd |w|^2 stands beside 1/2 |r|^2, so it has the same factor in the loss.

    Args:
        system: The linear model.
        step: The step, its direction formed.
        loss: The loss.
        trial: Evaluates it.
    """

    def __init__(self, system: System, step: Step, loss: Loss, trial: Trial) -> None:
        self.system, self.step, self.loss, self.trial = system, step, loss, trial
        self._weight = loss.weight(len(system.r), system.J.num_samples)
        self._linear, self._square = _penalty(system, step)

    @property
    def slope(self) -> float:
        """The derivative at the start: <gradient of the loss, diag(lr) d>, and the penalty's."""
        return self._weight * (float(self.system.r @ self.step.change) + self._linear)

    def predicted(self, fraction: float) -> float:
        """Return the decrease by the linear model."""
        r, change = self.system.r, fraction * self.step.change
        of_loss = modelled_decrease(self.loss, r, change, self.system.J.num_samples)
        return of_loss + self._of_penalty(fraction)

    def actual(self, fraction: float) -> tuple[float, float]:
        """Return the decrease of the loss alone, and of all that is minimised; costs one forward pass."""
        of_loss = self.trial.decrease(self.step, fraction)
        return of_loss, of_loss + self._of_penalty(fraction)

    def _of_penalty(self, fraction: float) -> float:
        return -self._weight * (fraction * self._linear + fraction * fraction * self._square)


def _penalty(system: System, step: Step) -> tuple[float, float]:
    """Return sum_g wd_g <w_g, lr_g d_g> and sum_g wd_g/2 |lr_g d_g|^2."""
    if not any(step.damping.weight_decay):
        return 0.0, 0.0
    assert step.direction is not None
    groups, num_groups = system.trained.groups, system.trained.num_groups
    inner = by_group(inner_products(system.params, step.direction), groups, num_groups)
    squares = by_group([norm * norm for norm in norms(step.direction)], groups, num_groups)
    linear = square = 0.0
    for wd, lr, a, b in zip(step.damping.weight_decay, step.lr, inner, squares, strict=True):
        linear += wd * lr * sum(a)
        square += wd * lr * lr * sum(b) / 2
    return linear, square
