"""Whether a proposed step is taken, what fraction of it, and what that does to alpha.

`LevenbergMarquardt` and `Armijo` evaluate the loss at trial points, on the same mini-batch, with the same random
numbers and from the same state of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gramgn.optim.algorithm import LinearModel, Step
from gramgn.optim.closure import Closure
from gramgn.optim.losses import Loss, modelled_decrease
from gramgn.optim.runtime import by_group, drew_random_numbers, inner_products, norms
from gramgn.optim.settings import check_flag, check_keys, check_number, check_whole
from gramgn.optim.snapshot import Snapshot

# Differences of the loss below this number of its roundings are noise.
ROUNDINGS = 16
# A grid of step sizes ends after this number in a row that are worse than the best so far.
PATIENCE = 2

Groups = Sequence[MutableMapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The decision on one step."""

    step: Step  # the last step that was proposed
    fraction: float = 1.0  # the fraction of it that is taken; 0: the step was given up
    actual_decrease: float | None = None  # of the loss on the same mini-batch; None: not measured
    rejected: int = 0  # the number of tries that were rejected

    @property
    def given_up(self) -> bool:
        """Whether a step that exists is not taken."""
        return self.step.finite and self.fraction == 0


class Acceptance(Protocol):
    """A rule that evaluates trial points."""

    def check(self, groups: Groups) -> None:
        """Reject hyper-parameters with which the rule makes no sense."""

    def decide(self, propose: Callable[[], Step], along: Callable[[Step], Line], groups: Groups) -> Outcome:
        """Decide on one step.

        Args:
            propose: Solves the system with the alpha that the groups hold; needs no new Jacobian.
            along: Returns the loss along a step.
            groups: The parameter groups, in which alpha may be changed.
        """


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Adaptive damping by the ratio rho = actual / predicted decrease on the same mini-batch.

    Where rho > `high`, alpha of all groups is divided by `factor` for the next step; where rho < `low`, it is
    multiplied. With `reject`, a step that does not lower the loss is not taken: alpha is raised and the same system
    solved again. The decrease is that of the loss and, where there is one, of the penalty of weight decay inside the
    solve. Costs one more forward pass per try (two where the model draws random numbers). Needs lam >= 1/2, below which
    the linear model itself can predict an increase, and alpha > 0.

    Marquardt (1963, J. SIAM 11) for the rule; Nielsen (1999, IMM-REP-1999-05) for the ratio; Martens and Grosse (2015,
    arXiv 1503.05671, section 6.5) for mini-batches and the bounds 1/4 and 3/4.

    Args:
        factor: The factor by which alpha is multiplied or divided, > 1; default 2.
        low: Lower bound of rho; default 1/4.
        high: Upper bound of rho; default 3/4.
        reject: Whether steps that do not lower the loss are rejected; default True.
        max_tries: With `reject`, the number of solves after which the step is given up: nothing moves, and alpha stays
            raised. Default 8.
        min_alpha: The value below which alpha is never lowered, in the optimizer's damping convention; default 1e-8.
        max_alpha: The value above which alpha is never raised; default 1e8.

    Raises:
        ValueError: A value is out of range.
    """

    factor: float = 2.0
    low: float = 0.25
    high: float = 0.75
    reject: bool = True
    max_tries: int = 8
    min_alpha: float = 1e-8
    max_alpha: float = 1e8

    def __post_init__(self) -> None:
        check_number("adaptive_damping.factor", self.factor, least=1.0, strict=True)
        check_number("adaptive_damping.low", self.low, least=0.0)
        check_number("adaptive_damping.high", self.high, least=0.0)
        check_flag("adaptive_damping.reject", self.reject)
        check_whole("adaptive_damping.max_tries", self.max_tries, least=1)
        check_number("adaptive_damping.min_alpha", self.min_alpha, least=0.0, strict=True)
        check_number("adaptive_damping.max_alpha", self.max_alpha, least=0.0, strict=True)
        for less, more in (("low", "high"), ("min_alpha", "max_alpha")):
            if getattr(self, less) > getattr(self, more):
                raise ValueError(
                    f"adaptive_damping.{less} must be at most {more}, got {getattr(self, less)!r} and "
                    f"{getattr(self, more)!r}"
                )

    def check(self, groups: Groups) -> None:
        """Reject lam < 1/2, alpha = 0 and alpha > `max_alpha`."""
        if groups[0]["lam"] < 0.5:
            raise ValueError(
                f"adaptive damping needs lam >= 0.5, got {groups[0]['lam']!r}: below, the linear model of a full "
                "step can predict an increase of the loss. Raise lam, or leave out adaptive_damping"
            )
        if any(group["alpha"] > self.max_alpha for group in groups):
            raise ValueError(
                f"alpha must be at most adaptive_damping.max_alpha, {self.max_alpha:g}, above which it is never "
                f"raised; got {max(group['alpha'] for group in groups):g}"
            )
        if any(group["alpha"] == 0 for group in groups):
            raise ValueError(
                "adaptive damping multiplies alpha, so it needs alpha > 0 in every parameter group"
            )

    def decide(self, propose: Callable[[], Step], along: Callable[[Step], Line], groups: Groups) -> Outcome:
        """Solve until a step is good enough, and change alpha in the groups on the way; see `Acceptance`."""
        rejected = 0
        while True:
            step = propose()
            if not step.finite:
                return Outcome(step, 0.0, None, rejected)
            line = along(step)
            of_loss, actual = line.actual(1.0)
            predicted = line.predicted(1.0)
            if max(abs(actual), abs(predicted)) <= line.noise:
                return Outcome(step, 1.0, of_loss, rejected)
            if self.reject and not (actual > 0 and math.isfinite(actual)):
                rejected += 1
                if not self._change(groups, self.factor) or rejected == self.max_tries:
                    return Outcome(step, 0.0, 0.0, rejected)
                continue
            self._follow(groups, actual, predicted)
            return Outcome(step, 1.0, of_loss, rejected)

    def _follow(self, groups: Groups, actual: float, predicted: float) -> None:
        """Change alpha by the ratio; a prediction of no decrease, or a loss that is not finite, is the worst."""
        ratio = actual / predicted if predicted > 0 and math.isfinite(actual) else -math.inf
        if ratio > self.high:
            self._change(groups, 1 / self.factor)
        elif ratio < self.low:
            self._change(groups, self.factor)

    def _change(self, groups: Groups, factor: float) -> bool:
        """Multiply alpha of all groups, within the limits; return whether any changed."""
        before = [group["alpha"] for group in groups]
        for group in groups:
            group["alpha"] = min(max(float(group["alpha"]) * factor, self.min_alpha), self.max_alpha)
        return before != [group["alpha"] for group in groups]


@dataclass(frozen=True)
class Armijo:
    """Backtracking on the step size: L(w + t lr d) <= L(w) + c t <grad L, lr d> on the same mini-batch.

    t starts at 1 and is multiplied by `shrink`. L is the loss and, where there is one, the penalty of weight decay
    inside the solve; <grad L, d> follows from J d without a further pass. Where d is no direction of descent, or no t
    is small enough, nothing moves. Costs one forward pass per try (one more where the model draws random numbers).

    Armijo (1966, Pacific J. Math. 16); Nocedal and Wright (2006), section 3.1.

    Args:
        c: The required share of the first-order decrease, in (0, 1); default 1e-4.
        shrink: The factor of t after a rejected try, in (0, 1); default 1/2.
        max_tries: The number of step sizes that are tried; default 10.

    Raises:
        ValueError: A value is out of range.
    """

    c: float = 1e-4
    shrink: float = 0.5
    max_tries: int = 10

    def __post_init__(self) -> None:
        check_number("line_search.c", self.c, least=0.0, strict=True, below=1.0)
        check_number("line_search.shrink", self.shrink, least=0.0, strict=True, below=1.0)
        check_whole("line_search.max_tries", self.max_tries, least=1)

    def check(self, groups: Groups) -> None:
        """Reject nothing: every direction can be tried."""

    def decide(self, propose: Callable[[], Step], along: Callable[[Step], Line], groups: Groups) -> Outcome:
        """Try shorter and shorter steps in one direction; see `Acceptance`."""
        step = propose()
        if not step.finite:
            return Outcome(step, 0.0)
        line = along(step)
        slope, fraction = line.slope, 1.0
        if abs(slope) <= line.noise and abs(line.predicted(1.0)) <= line.noise:
            return Outcome(step)
        if not slope < 0:
            return Outcome(step, 0.0, 0.0, rejected=1)
        for rejected in range(self.max_tries):
            of_loss, actual = line.actual(fraction)
            if actual >= -self.c * fraction * slope:
                return Outcome(step, fraction, of_loss, rejected)
            fraction *= self.shrink
        return Outcome(step, 0.0, 0.0, self.max_tries)


@dataclass(frozen=True)
class Grid:
    """The best of a grid of step sizes t = 1, `shrink`, `shrink`^2, ... on the same mini-batch.

    That is the one with the smallest loss (and, where there is one, penalty of weight decay inside the solve). The
    search ends after two step sizes in a row that are worse than the best so far. Where no loss is smaller than at the
    start, nothing moves. Costs one forward pass per step size that is tried (one more where the model draws random
    numbers). Common for physics-informed networks (Mueller and Zeinhofer 2023, arXiv 2302.13163), on whose long valleys
    a step that is merely short enough is often too long.

    Args:
        shrink: The factor between step sizes, in (0, 1); default 1/2.
        num_tries: The number of step sizes; default 16.

    Raises:
        ValueError: A value is out of range.
    """

    shrink: float = 0.5
    num_tries: int = 16

    def __post_init__(self) -> None:
        check_number("line_search.shrink", self.shrink, least=0.0, strict=True, below=1.0)
        check_whole("line_search.num_tries", self.num_tries, least=1)

    def check(self, groups: Groups) -> None:
        """Reject nothing: every direction can be tried."""

    def decide(self, propose: Callable[[], Step], along: Callable[[Step], Line], groups: Groups) -> Outcome:
        """Try all step sizes in one direction; see `Acceptance`."""
        step = propose()
        if not step.finite:
            return Outcome(step, 0.0)
        line = along(step)
        best, of_best, least, worse = 0.0, 0.0, 0.0, 0
        for number in range(self.num_tries):
            fraction = self.shrink**number
            of_loss, actual = line.actual(fraction)
            if actual > least:
                best, of_best, least, worse = fraction, of_loss, actual, 0
            else:
                worse += best > 0
            if worse == PATIENCE:
                break
        if not best and abs(line.predicted(1.0)) <= line.noise:
            return Outcome(step)
        return Outcome(step, best, of_best, rejected=number + (best == 0))


LINE_SEARCHES: dict[str, type[Armijo] | type[Grid]] = {"armijo": Armijo, "grid": Grid}


def make_acceptance(adaptive_damping: Any, line_search: Any) -> Acceptance | None:
    """Return the rule that evaluates trial points, or None where every step is taken as it is."""
    if isinstance(line_search, str) and line_search in LINE_SEARCHES:
        line_search = LINE_SEARCHES[line_search]()
    search = line_search if isinstance(line_search, Grid) else _built("line_search", line_search, Armijo)
    damping = _built("adaptive_damping", adaptive_damping, LevenbergMarquardt)
    if damping is not None and search is not None:
        raise ValueError(
            "adaptive_damping and line_search both decide on the length of one step: choose one of them, and set "
            "the other to None (null in a configuration)"
        )
    return damping or search


def _built(name: str, given: Any, kind: type[Any]) -> Any:
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        choices = "None, 'armijo', 'grid'" if kind is Armijo else "None"
        raise ValueError(
            f"{name} must be {choices}, a gramgn.optim.{kind.__name__} or a mapping of its fields, got {given!r}"
        )
    check_keys(name, given, tuple(field.name for field in fields(kind)))
    return kind(**given)


class Trial:
    """Calls the closure again with the parameters moved for the length of the call.

    They are moved by exchanging their memory, so that they are bitwise as before afterwards, and no graph that saved
    them notices. The model runs as it is, once on the whole batch, from the state `before`, in which the engine found
    it, and leaves no trace: neither in random numbers nor in buffers or attributes of the network.
    """

    def __init__(self, closure: Closure, loss: Loss, model: LinearModel, before: Snapshot) -> None:
        self.closure, self.loss, self.model, self.before = closure, loss, model, before
        self.eps = torch.finfo(model.J.reading.residual.dtype).eps

    @cached_property
    def start(self) -> float:
        """The loss at this point.

        An engine may draw other masks than the plain model, or run it in a shorter format: then the loss that the
        engine saw cannot be compared, and the plain model's is evaluated here.
        """
        comparable = not self.drew_random_numbers() and self.model.J.eps <= self.eps
        return float(self.model.J.reading.loss) if comparable else self.evaluate(None, ())

    def drew_random_numbers(self) -> bool:
        """Return whether random numbers were drawn when J was formed."""
        return drew_random_numbers(self.before.random, self.before.device)

    def decrease(self, step: Step, fraction: float) -> float:
        """Return the decrease of the loss by a fraction of the step; not finite where the loss is not."""
        assert step.direction is not None, "trial points need the direction"
        start = self.start
        return start - self.evaluate(step.direction, [fraction * lr for lr in step.lr])

    def evaluate(self, direction: Sequence[Tensor] | None, lr: Sequence[float]) -> float:
        """Return the loss at w_g + lr_g d_g; None: at w."""
        if direction is None:
            return self._evaluate()
        with _moved(self.model.params, direction, [lr[group] for group in self.model.trained.groups]):
            return self._evaluate()

    def _evaluate(self) -> float:
        differentiates = torch.set_grad_enabled(self.model.J.reading.by_graph)
        with Snapshot(self.before.model, self.before.device).kept(), differentiates:
            self.before.restore()
            return self.loss.value(self.closure())


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
    """The objective along a step: the loss and the penalty of weight decay inside the solve.

    The penalty 1/2 wd |w|^2 is added to 1/2 |r|^2, so it has the same factor in the loss.
    """

    def __init__(self, trial: Trial, step: Step) -> None:
        self.trial, self.step, self.model, self.loss = trial, step, trial.model, trial.loss
        self._weight = self.loss.weight(len(self.model.r), self.model.J.num_samples)
        self._linear, self._square = _penalty(self.model, step)

    @property
    def noise(self) -> float:
        """The size up to which differences of the loss are rounding."""
        return ROUNDINGS * self.trial.eps * abs(self.trial.start)

    @property
    def slope(self) -> float:
        """The derivative at the start: <gradient of the loss, diag(lr) d>, and the penalty's."""
        return self._weight * (float(self.model.r @ self.step.change) + self._linear)

    def predicted(self, fraction: float) -> float:
        """Return the decrease that the linear model predicts."""
        r, change = self.model.r, fraction * self.step.change
        of_loss = modelled_decrease(self.loss, r, change, self.model.J.num_samples)
        return of_loss + self._of_penalty(fraction)

    def actual(self, fraction: float) -> tuple[float, float]:
        """Return the decrease of the loss alone, and of the objective; costs one forward pass."""
        of_loss = self.trial.decrease(self.step, fraction)
        return of_loss, of_loss + self._of_penalty(fraction)

    def _of_penalty(self, fraction: float) -> float:
        return -self._weight * (fraction * self._linear + fraction * fraction * self._square)


def _penalty(model: LinearModel, step: Step) -> tuple[float, float]:
    """Return sum_g wd_g <w_g, lr_g d_g> and sum_g wd_g/2 |lr_g d_g|^2."""
    if not any(step.damping.weight_decay):
        return 0.0, 0.0
    assert step.direction is not None
    groups, num_groups = model.trained.groups, model.trained.num_groups
    inner = by_group(inner_products(model.params, step.direction), groups, num_groups)
    squares = by_group([norm * norm for norm in norms(step.direction)], groups, num_groups)
    linear = square = 0.0
    for wd, lr, a, b in zip(step.damping.weight_decay, step.lr, inner, squares, strict=True):
        linear += wd * lr * sum(a)
        square += wd * lr * lr * sum(b) / 2
    return linear, square
