"""From the losses of an epoch's steps to a row of metrics.csv: what a step measured, and its mean over the epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gramgn.optim import StepInfo

MEANS = ("grad_norm", "step_norm", "predicted_decrease", "actual_decrease", "trace_gram")
SOLVES = ("cholesky", "eigh", "minimum_norm", "non_finite")
COUNTS = ("ill_conditioned", "rejected_steps", "given_up", *(f"solve_{status}" for status in SOLVES))


@dataclass(frozen=True)
class StepReport:
    """What one step measured.

    Attributes:
        num_samples: b, the number of samples in the batch.
        loss: Mean square of the residuals before the step, in standardised units.
        absolute_error: Mean absolute residual before the step, in standardised units.
        finite: Whether loss and step were finite. If not, no parameter has moved.
        grad_norm: |gradient of the loss|, for optimizers of the gradient.
        info: The report of an optimizer of the residuals.
    """

    num_samples: int
    loss: float
    absolute_error: float
    finite: bool
    grad_norm: float | None = None
    info: StepInfo | None = None

    def means(self) -> dict[str, float]:
        """Return the columns of metrics.csv whose mean over the epoch is recorded."""
        if self.info is None:
            return {} if self.grad_norm is None else {"grad_norm": self.grad_norm}
        info = self.info
        measured = {
            "step_norm": info.step_norm,
            "predicted_decrease": info.predicted_decrease,
            "trace_gram": info.trace,
            "actual_decrease": info.actual_decrease,  # it costs a forward pass, so that not every step measures it
        }
        return {name: value for name, value in measured.items() if math.isfinite(value)}


@dataclass
class EpochMeter:
    """Sums over the steps of an epoch, kept in checkpoints so that an epoch can be resumed in its middle.

    `train_loss` and `train_mae` are means of the values *before* each step, weighted by samples; `alpha` and
    `alpha_sum` are those of the last step.
    """

    samples: int = 0
    skipped_batches: int = 0
    loss: float = 0.0
    absolute_error: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    alpha: float | None = None
    alpha_sum: float | None = None
    lambda_min: float | None = None
    lambda_max: float | None = None

    def add(self, report: StepReport) -> None:
        """Add one step."""
        self.samples += report.num_samples
        self.loss += report.loss * report.num_samples
        self.absolute_error += report.absolute_error * report.num_samples
        for name, value in report.means().items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.numbers[name] = self.numbers.get(name, 0) + 1
        if (info := report.info) is not None:
            if math.isfinite(info.alpha_sum):
                self.alpha, self.alpha_sum = info.alpha, info.alpha_sum
            self.counts = dict.fromkeys(COUNTS, 0) | self.counts
            if info.status in SOLVES:  # a user-defined optimizer may solve in another way, or not at all
                self.counts[f"solve_{info.status}"] += 1
            self.counts["ill_conditioned"] += int(info.ill_conditioned)
            self.counts["rejected_steps"] += info.rejected
            self.counts["given_up"] += int(info.given_up)

    def close(self, last: StepInfo | None) -> None:
        """Take the spectrum of G of the epoch's last step; it is measured once per epoch, outside training."""
        if last is not None and last.gram.numel():
            self.lambda_min, self.lambda_max = last.spectrum()

    def row(self, target_std: float) -> dict[str, Any]:
        """Return the columns of metrics.csv that come from the steps, maes in the data's unit."""
        samples = self.samples
        return {
            "train_loss": self.loss / samples if samples else None,
            "train_mae": self.absolute_error / samples * target_std if samples else None,
            **{name: self.sums[name] / self.numbers[name] if name in self.sums else None for name in MEANS},
            "lambda_min": self.lambda_min,
            "lambda_max": self.lambda_max,
            "skipped_batches": self.skipped_batches,
            **{name: self.counts.get(name) for name in COUNTS},
        }
