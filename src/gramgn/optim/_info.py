"""What a step tells its caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHOLESKY = "cholesky"
EIGH = "eigh"
MINIMUM_NORM = "minimum_norm"
NON_FINITE = "non_finite"
STATUSES = (CHOLESKY, EIGH, MINIMUM_NORM, NON_FINITE)

WARNINGS = {
    NON_FINITE: "a residual, the Gram matrix or the step was not finite: this step changed no parameter",
    "ill_conditioned": (
        "the small eigenvalues of G = J J^T are rounding: alpha is too small for the precision of the "
        "Jacobian, or it is 0 and they were cut off. Raise alpha, or use float64 (on CUDA also: switch TF32 "
        "off)"
    ),
}


class SolveError(RuntimeError):
    """The linear system could not be solved; the parameters are as they were before the step."""


@dataclass(frozen=True)
class StepInfo:
    """What one step of Gram-Gauss-Newton saw and did.

    Attributes:
        loss: mean(r^2) over samples and outputs before the step, no factor 1/2; with ``loss="cross_entropy"`` the
            mean cross-entropy.
        residual: r as the closure returned it, detached, [b] or [b, k]; with ``loss="cross_entropy"`` sqrt(p) - e_c
            / sqrt(p_c) for the label c.
        num_samples: b.
        lam: The weight of the Gram matrix in this step.
        alpha_sum: The damping in this step beside the *sum* J J^T (of the first parameter group).
        step_norm: The Euclidean norm of lr d over all parameters, as it was taken (decoupled weight decay comes on
            top); 0 where nothing moved.
        predicted_decrease: How far the linear model r + J (lr d) lowers the loss (can be negative for lam < 1/2, or
            with momentum); 0 where the step was given up, nan where it was not finite.
        status: How the system was solved: ``"cholesky"``, ``"eigh"`` (Cholesky failed), ``"minimum_norm"`` (no
            damping to speak of) or ``"non_finite"`` (no parameter was changed).
        ill_conditioned: G's small eigenvalues were rounding: alpha is below what the precision of J can
            resolve, or directions were cut off by the minimum-norm solution.
        trace: The trace of G.
        gram: G = J J^T in float64, [b, b] or [b k, b k] with rows (sample, output), summed over parameter groups.
            Drop it if you keep many infos.
        alpha: The damping in this step in the configured convention, after warm-up (of the first group).
        lr: The step length that was taken (of the first group): shorter than configured after a line search or where
            ``max_step_norm`` was exceeded; 0 where nothing moved.
        actual_decrease: How far the loss fell on this mini-batch by the step; 0 where it was given up, nan where it
            was not measured (without ``adaptive_damping`` or ``line_search``).
        rejected: How many tries were refused before. Where ``given_up``, all were.
        given_up: Whether every try was refused, so that no parameter was changed.
    """

    loss: float
    residual: Tensor
    num_samples: int
    lam: float
    alpha_sum: float
    step_norm: float
    predicted_decrease: float
    status: str
    ill_conditioned: bool
    trace: float
    gram: Tensor
    alpha: float
    lr: float
    actual_decrease: float
    rejected: int
    given_up: bool

    def spectrum(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue of G (nan where G is not finite)."""
        if not bool(torch.isfinite(self.gram).all()):
            return float("nan"), float("nan")
        eigenvalues = torch.linalg.eigvalsh(self.gram)
        return float(eigenvalues[0]), float(eigenvalues[-1])
