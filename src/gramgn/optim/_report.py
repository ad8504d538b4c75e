"""The account of a step."""

from __future__ import annotations

import math

from gramgn.optim._acceptance import Outcome
from gramgn.optim._info import NON_FINITE, StepInfo
from gramgn.optim._system import System
from gramgn.optim.losses import Loss, modelled_decrease


def report(system: System, outcome: Outcome, loss: Loss) -> StepInfo:
    """Return what a step saw and did.

    Args:
        system: The linear model of the batch.
        outcome: What was taken of which step.
        loss: What is minimised.
    """
    step, fraction, num_samples = outcome.step, outcome.fraction, system.J.num_samples
    first, decrease = step.settings.first, math.nan
    if step.finite:
        decrease = modelled_decrease(loss, system.r, fraction * step.change, num_samples)
    return StepInfo(
        loss=float(system.J.reading.loss),
        residual=system.J.reading.residual,
        num_samples=num_samples,
        lam=step.settings.lam,
        alpha_sum=step.damping.alpha[first],
        step_norm=fraction * step.norm if step.finite else 0.0,
        predicted_decrease=decrease,
        status=step.solution.status if step.finite else NON_FINITE,
        ill_conditioned=step.solution.ill_conditioned and step.finite,
        trace=system.trace,
        gram=system.gram,
        alpha=step.settings.alpha[first],
        lr=fraction * step.lr[first] if step.finite else 0.0,
        actual_decrease=math.nan if outcome.actual_decrease is None else outcome.actual_decrease,
        rejected=outcome.rejected,
        given_up=outcome.given_up,
    )
