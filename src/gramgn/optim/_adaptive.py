"""Adaptive damping: alpha follows how well the linear model told the decrease of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramgn.optim._acceptance import Outcome
from gramgn.optim._checks import check_flag, check_number, check_whole
from gramgn.optim._system import Step
from gramgn.optim._trial import Line


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Adaptive damping by the ratio rho = actual / predicted decrease on the same mini-batch.

    rho > ``high``: alpha of all groups is divided by ``factor`` for the next step. rho < ``low``: multiplied. With
    ``reject``, a step that does not lower the loss is not taken: alpha is raised and the same system solved again.
    What is compared is the loss and, where there is one, the penalty of weight decay inside of the solve. Costs one
    more forward pass for each try (two where the model draws random numbers). Needs lam >= 1/2, below which the
    linear model itself can predict an increase, and alpha > 0.

    Marquardt (1963, J. SIAM 11) for the rule; Nielsen (1999, IMM-REP-1999-05) for the ratio; Martens and Grosse
    (2015, arXiv 1503.05671, section 6.5) for mini-batches and the bounds 1/4 and 3/4.

    Args:
        factor: What alpha is multiplied or divided by, > 1.
        low: Lower bound of rho.
        high: Upper bound of rho.
        reject: Whether steps that do not lower the loss are refused.
        max_tries: With ``reject``, how many solves before the step is given up: nothing moves, alpha stays raised.
        min_alpha: alpha is never lowered below, in the optimizer's damping convention.
        max_alpha: alpha is never raised above.

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

    def check(self, groups: Sequence[MutableMapping[str, Any]]) -> None:
        """Refuse lam < 1/2 and alpha = 0.

        Raises:
            ValueError: One of them is given.
        """
        if groups[0]["lam"] < 0.5:
            raise ValueError(
                f"adaptive damping needs lam >= 0.5, got {groups[0]['lam']!r}: below, the linear model of a full "
                "step can predict an increase of the loss. Raise lam, or leave adaptive_damping away"
            )
        if any(group["alpha"] > self.max_alpha for group in groups):
            raise ValueError(
                f"alpha must be at most adaptive_damping.max_alpha, {self.max_alpha:g}, which it is never raised "
                f"above; got {max(group['alpha'] for group in groups):g}"
            )
        if any(group["alpha"] == 0 for group in groups):
            raise ValueError(
                "adaptive damping multiplies alpha, so it needs alpha > 0 in every parameter group"
            )

    def decide(
        self,
        propose: Callable[[], Step],
        along: Callable[[Step], Line],
        groups: Sequence[MutableMapping[str, Any]],
    ) -> Outcome:
        """Solve until a step is good enough, changing alpha in the groups on the way; see ``Acceptance``."""
        rejected = 0
        while True:
            step = propose()
            if not step.finite:
                return Outcome(step, 0.0, None, rejected)
            line = along(step)
            of_loss, actual = line.actual(1.0)
            predicted = line.predicted(1.0)
            if max(abs(actual), abs(predicted)) <= line.trial.noise:
                return Outcome(step, 1.0, of_loss, rejected)
            if self.reject and not (actual > 0 and math.isfinite(actual)):
                rejected += 1
                if not self._change(groups, self.factor) or rejected == self.max_tries:
                    return Outcome(step, 0.0, 0.0, rejected)
                continue
            self._follow(groups, actual, predicted)
            return Outcome(step, 1.0, of_loss, rejected)

    def _follow(self, groups: Sequence[MutableMapping[str, Any]], actual: float, predicted: float) -> None:
        """Change alpha by the ratio; a prediction of no decrease, or a loss that is not finite, is the worst."""
        ratio = actual / predicted if predicted > 0 and math.isfinite(actual) else -math.inf
        if ratio > self.high:
            self._change(groups, 1 / self.factor)
        elif ratio < self.low:
            self._change(groups, self.factor)

    def _change(self, groups: Sequence[MutableMapping[str, Any]], factor: float) -> bool:
        """Multiply alpha of all groups, within the limits; return whether any changed."""
        before = [group["alpha"] for group in groups]
        for group in groups:
            group["alpha"] = min(max(float(group["alpha"]) * factor, self.min_alpha), self.max_alpha)
        return before != [group["alpha"] for group in groups]
