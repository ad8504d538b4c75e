"""Line search: the step is shortened until the loss falls by enough."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramgn.optim._acceptance import Outcome
from gramgn.optim._checks import check_number, check_whole
from gramgn.optim._system import Step
from gramgn.optim._trial import Line


@dataclass(frozen=True)
class Armijo:
    """Backtracking on the step length: L(w + t lr d) <= L(w) + c t <grad L, lr d> on the same mini-batch.

    t starts at 1 and is multiplied by ``shrink``. L is the loss and, where there is one, the penalty of weight decay
    inside of the solve; <grad L, d> comes from J d without a further pass. Where d is no direction of descent, or no t
    is short enough, nothing moves. Costs one forward pass for each try (one more where the model draws random
    numbers).

    Armijo (1966, Pacific J. Math. 16); Nocedal and Wright (2006), section 3.1.

    Args:
        c: The share of the first-order decrease that is asked for, in (0, 1).
        shrink: What t is multiplied by, in (0, 1).
        max_tries: How many step lengths are tried.

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

    def check(self, groups: Sequence[MutableMapping[str, Any]]) -> None:
        """Refuse nothing: every direction can be tried."""

    def decide(
        self,
        propose: Callable[[], Step],
        along: Callable[[Step], Line],
        groups: Sequence[MutableMapping[str, Any]],
    ) -> Outcome:
        """Try shorter and shorter steps in one direction; see ``Acceptance``."""
        step = propose()
        if not step.finite:
            return Outcome(step, 0.0)
        line = along(step)
        slope, fraction = line.slope, 1.0
        if abs(slope) <= line.trial.noise and abs(line.predicted(1.0)) <= line.trial.noise:
            return Outcome(step)
        if not slope < 0:
            return Outcome(step, 0.0, 0.0, rejected=1)
        for rejected in range(self.max_tries):
            of_loss, actual = line.actual(fraction)
            if actual >= -self.c * fraction * slope:
                return Outcome(step, fraction, of_loss, rejected)
            fraction *= self.shrink
        return Outcome(step, 0.0, 0.0, self.max_tries)
