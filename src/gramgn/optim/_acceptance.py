"""Whether a proposed step is taken, how much of it, and what that does to alpha."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gramgn.optim._system import Step
from gramgn.optim._trial import Line


@dataclass(frozen=True)
class Outcome:
    """What was decided.

    Attributes:
        step: The last step that was proposed.
        fraction: How much of it is taken; 0: none, the step was given up.
        actual_decrease: Of the loss on the same mini-batch; None: not measured.
        rejected: How many tries were refused.
    """

    step: Step
    fraction: float = 1.0
    actual_decrease: float | None = None
    rejected: int = 0

    @property
    def given_up(self) -> bool:
        """Whether a step that exists is not taken."""
        return self.step.finite and self.fraction == 0


class Acceptance(Protocol):
    """A rule that looks at trial points."""

    def check(self, groups: Sequence[MutableMapping[str, Any]]) -> None:
        """Refuse hyper-parameters with which the rule makes no sense.

        Raises:
            ValueError: There are some.
        """

    def decide(
        self,
        propose: Callable[[], Step],
        along: Callable[[Step], Line],
        groups: Sequence[MutableMapping[str, Any]],
    ) -> Outcome:
        """Decide on one step.

        Args:
            propose: Solves with the alpha that stands in the groups; no new Jacobian.
            along: Returns what the loss does along a step.
            groups: The parameter groups, to change alpha in.
        """
