"""What a step reports to its caller."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramgn.optim.acceptance import Outcome
from gramgn.optim.algorithm import LinearModel
from gramgn.optim.losses import Loss, modelled_decrease
from gramgn.optim.solve import NON_FINITE

WARNINGS = {
    NON_FINITE: "a residual, the Gram matrix or the step was not finite: this step changed no parameter",
    "ill_conditioned": (
        "the small eigenvalues of G = J J^T are rounding: alpha is too small for the precision of the "
        "Jacobian, or it is 0 and they were cut off. Raise alpha, or use float64 (on CUDA also: switch TF32 "
        "off)"
    ),
}


class HasSpectrum:
    """Something with a Gram matrix."""

    gram: Tensor

    def spectrum(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue of G (nan where G is not finite or was not given)."""
        if not self.gram.numel() or not bool(torch.isfinite(self.gram).all()):
            return float("nan"), float("nan")
        eigenvalues = torch.linalg.eigvalsh(self.gram)
        return float(eigenvalues[0]), float(eigenvalues[-1])


@dataclass(frozen=True)
class TermInfo(HasSpectrum):
    """Statistics of one term of a step.

    Attributes:
        name: The name of the term's function.
        weight: The weight of the term.
        num_samples: The number of its samples.
        loss: mean(r^2) over its samples and residuals before the step, without the weight.
        residual: r as its function returned it, detached, [b] or [b, k]. Not shown by `repr`.
        gram: Its block of the G of the step, of its rows as they are scaled there. Not shown by `repr`.
    """

    name: str
    weight: float
    num_samples: int
    loss: float
    residual: Tensor = field(repr=False)
    gram: Tensor = field(repr=False)


@dataclass(frozen=True)
class StepInfo(HasSpectrum):
    """Statistics of one step.

    `GramGaussNewton.step` sets every field. The defaults stand for what a user-defined optimizer does not measure.

    Attributes:
        loss: mean(r^2) over samples and outputs before the step, without a factor 1/2; with `loss="cross_entropy"` the
            mean cross-entropy.
        num_samples: The number of samples b.
        residual: r as the closure returned it, detached, [b] or [b, k]; with `loss="cross_entropy"` sqrt(p) - e_c /
            sqrt(p_c) for the label c. Not shown by `repr`.
        lam: The weight of the Gram matrix in this step.
        alpha_sum: The damping in this step in the *sum* convention (of the first parameter group).
        step_norm: The Euclidean norm of lr d over all parameters, as it was taken (without decoupled weight decay); 0
            where nothing moved.
        predicted_decrease: The decrease of the loss by the linear model r + J (lr d) (can be negative for lam < 1/2, or
            with momentum); 0 where the step was given up, nan where it was not finite.
        status: How the system was solved: `"cholesky"`, `"eigh"` (Cholesky failed), `"minimum_norm"` (no damping, or
            one lost in rounding) or `"non_finite"` (no parameter was changed); `"unknown"` by default.
        ill_conditioned: Whether G's small eigenvalues were rounding: alpha is below what the precision of J can
            resolve, or directions were cut off by the minimum-norm solution.
        trace: The trace of G.
        gram: G = J J^T in float64, [b, b] or [b k, b k] with rows (sample, output), summed over parameter groups. Drop
            it if you keep many infos. Not shown by `repr`.
        alpha: The damping in this step in the configured convention, after warm-up (of the first group).
        lr: The step size that was taken (of the first group): smaller than configured after a line search or where
            `max_step_norm` was exceeded; 0 where nothing moved.
        actual_decrease: The decrease of the loss on this mini-batch by the step; 0 where it was given up, nan where it
            was not measured (without `adaptive_damping` or `line_search`).
        rejected: The number of tries that were rejected before. Where `given_up`, all were.
        given_up: Whether every try was rejected, so that no parameter was changed.
        terms: The statistics of each term of a step on `terms`. Of such a step, `loss` is the sum over terms of weight
            times mean(r^2) over the term's samples and residuals; `residual` [n] and `gram` hold the rows of all terms
            as they are scaled (see `GramGaussNewton.step`), and the decreases are those of mean(`residual`^2), which
            is `loss` where each term has one residual per sample and the damping convention is not `"sum"`.
    """

    loss: float
    num_samples: int
    residual: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    lam: float = math.nan
    alpha_sum: float = math.nan
    step_norm: float = math.nan
    predicted_decrease: float = math.nan
    status: str = "unknown"
    ill_conditioned: bool = False
    trace: float = math.nan
    gram: Tensor = field(default_factory=lambda: torch.empty(0, 0), repr=False)
    alpha: float = math.nan
    lr: float = math.nan
    actual_decrease: float = math.nan
    rejected: int = 0
    given_up: bool = False
    terms: tuple[TermInfo, ...] = ()


def report(model: LinearModel, outcome: Outcome, loss: Loss) -> StepInfo:
    """Return what a step saw and did."""
    step, fraction, num_samples = outcome.step, outcome.fraction, model.J.num_samples
    first, decrease = step.settings.first, math.nan
    if step.finite:
        decrease = modelled_decrease(loss, model.r, fraction * step.change, num_samples)
    return StepInfo(
        loss=float(model.J.reading.loss),
        residual=model.J.reading.residual,
        num_samples=num_samples,
        lam=step.settings.lam,
        alpha_sum=step.damping.alpha[first],
        step_norm=fraction * step.norm if step.finite else 0.0,
        predicted_decrease=decrease,
        status=step.solution.status if step.finite else NON_FINITE,
        ill_conditioned=step.solution.ill_conditioned and step.finite,
        trace=model.trace,
        gram=model.G,
        alpha=step.settings.alpha[first],
        lr=fraction * step.lr[first] if step.finite else 0.0,
        actual_decrease=math.nan if outcome.actual_decrease is None else outcome.actual_decrease,
        rejected=outcome.rejected,
        given_up=outcome.given_up,
    )
