"""Running means over the steps of one epoch, restorable in mid-epoch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from gramgn.optim import StepInfo
from gramgn.training._steps import StepReport

SOLVES = ("cholesky", "eigh", "minimum_norm", "non_finite")


@dataclass
class EpochMeter:
    """Sums over the steps of an epoch.

    ``train_loss`` and ``train_mae`` are means of the batches' values *before* each step, weighted by samples;
    ``alpha`` and ``alpha_sum`` are those of the last step.
    """

    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    absolute_error: float = 0.0
    grad_norm: float | None = None
    step_norm: float | None = None
    predicted_decrease: float | None = None
    actual_decrease: float | None = None
    measured_decreases: int = 0
    rejected_steps: int = 0
    alpha: float | None = None
    alpha_sum: float | None = None
    trace_gram: float | None = None
    ill_conditioned: int = 0
    skipped_batches: int = 0
    lambda_min: float | None = None
    lambda_max: float | None = None
    solves: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOLVES, 0))

    def add(self, report: StepReport) -> None:
        """Add one step."""
        self.samples += report.num_samples
        self.steps += 1
        self.loss += report.loss * report.num_samples
        self.absolute_error += report.absolute_error * report.num_samples
        if report.grad_norm is not None:
            self.grad_norm = (self.grad_norm or 0.0) + report.grad_norm
        info = report.info
        if info is not None:
            self.solves[info.status] += 1
            self.ill_conditioned += int(info.ill_conditioned)
            self.step_norm = (self.step_norm or 0.0) + info.step_norm
            self.predicted_decrease = (self.predicted_decrease or 0.0) + info.predicted_decrease
            if math.isfinite(info.actual_decrease):
                self.actual_decrease = (self.actual_decrease or 0.0) + info.actual_decrease
                self.measured_decreases += 1
            self.rejected_steps += info.rejected
            self.alpha, self.alpha_sum = info.alpha, info.alpha_sum
            self.trace_gram = (self.trace_gram or 0.0) + info.trace

    def close(self, last: StepInfo | None) -> None:
        """Take the spectrum of G of the epoch's last step; it is measured once an epoch, outside training."""
        if last is not None:
            self.lambda_min, self.lambda_max = last.spectrum()

    def row(self, target_std: float) -> dict[str, Any]:
        """Return the columns of metrics.csv that come from the steps; maes in the data's unit."""
        samples, steps = self.samples, max(self.steps, 1)
        solver = self.step_norm is not None
        return {
            "train_loss": self.loss / samples if samples else None,
            "train_mae": self.absolute_error / samples * target_std if samples else None,
            "grad_norm": _mean(self.grad_norm, steps),
            "step_norm": _mean(self.step_norm, steps),
            "predicted_decrease": _mean(self.predicted_decrease, steps),
            "actual_decrease": _mean(self.actual_decrease, max(self.measured_decreases, 1)),
            "trace_gram": _mean(self.trace_gram, steps),
            "lambda_min": self.lambda_min,
            "lambda_max": self.lambda_max,
            "ill_conditioned": self.ill_conditioned if solver else None,
            "rejected_steps": self.rejected_steps if solver else None,
            "skipped_batches": self.skipped_batches,
            **{f"solve_{name}": count if solver else None for name, count in self.solves.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return asdict(self)


def _mean(total: float | None, count: int) -> float | None:
    return None if total is None else total / count
