"""What is minimised, as a sum of squares whose linear model the optimizer solves.

b samples, k numbers a sample that are differentiated (residuals or logits); rows are (sample, number).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gramgn.optim._guards import check_logits, check_residual


@dataclass(frozen=True)
class Reading:
    """What the closure returned, taken apart.

    Attributes:
        loss: The batch's loss, a scalar.
        residual: r, detached, [b] or [b, k]: the loss is a multiple of |r|^2 to second order.
        differentiated: The tensor [b] or [b, k] whose Jacobian the engines form, connected to the output.
        root: R [b, k, k], where J is R^T times that Jacobian, sample by sample; None: the identity.
    """

    loss: Tensor
    residual: Tensor
    differentiated: Tensor
    root: Tensor | None = None

    def detached(self) -> Reading:
        """Return the reading without the graph behind it."""
        return replace(self, differentiated=self.differentiated.detach())


class Loss(Protocol):
    """A loss that is a sum of squares, or has a positive semi-definite curvature with a known root."""

    def read(self, returned: Any, output: Tensor, num_samples: int) -> Reading:
        """Take apart what a closure returned that called the model and got ``output`` [b, ...].

        Raises:
            ValueError: It is not what this loss needs.
        """

    def value(self, returned: Any) -> float:
        """Return the loss of what a closure returned, without a graph behind it."""

    def weight(self, num_rows: int, num_samples: int) -> float:
        """Return the factor of 1/2 |r|^2 in the loss's model, for n = b k rows and b samples."""


def modelled_decrease(loss: Loss, r: Tensor, change: Tensor, num_samples: int) -> float:
    """Return how far the loss falls by its model where the residuals r [n] become r + change.

    Not as a difference of squares: residuals of a size 1 / sqrt(p) would drown it.
    """
    return -loss.weight(len(r), num_samples) * float(r @ change + change @ change / 2)


class SquaredError:
    """mean(r^2) over samples and outputs, without a factor 1/2 (section 2 of arXiv 1905.11675)."""

    def read(self, returned: Any, output: Tensor, num_samples: int) -> Reading:
        """Take the residuals [b] or [b, k] as they are."""
        check_residual(returned, output, num_samples)
        r = returned.detach()
        return Reading(_mean_square(r), r, returned)

    def value(self, returned: Any) -> float:
        """Return mean(r^2)."""
        return float(_mean_square(returned))

    def weight(self, num_rows: int, num_samples: int) -> float:
        """Return 2 / n."""
        return 2 / num_rows


class CrossEntropy:
    """Mean cross-entropy of softmax(logits), the paper's future work (section 5 of arXiv 1905.11675).

    The curvature of one sample's loss in its logits is diag(p) - p p^T = R R^T with R = diag(sqrt p) - p
    sqrt(p)^T. With J = R^T (Jacobian of the logits) and r = sqrt(p) - e_c / sqrt(p_c) for the label c, J^T J is
    the generalised Gauss-Newton matrix of the summed loss and J^T r its gradient (R r = p - e_c; using p - e_c
    itself as the residual would be wrong). J J^T has b zero eigenvalues, because R sqrt(p) = 0.
    """

    def read(self, returned: Any, output: Tensor, num_samples: int) -> Reading:
        """Take logits [b, k] and labels [b] apart."""
        logits, labels = check_logits(returned, output, num_samples)
        with torch.no_grad():
            log_p, of_label = _log_softmax(logits, labels)
            # Below that, 1 / sqrt(p) would leave the format. R r = p - e_c holds all the same, and the curvature
            # gains no more than this p.
            root_p = (log_p.clamp(min=-0.8 * math.log(torch.finfo(log_p.dtype).max)) / 2).exp()
            R = torch.diag_embed(root_p) - log_p.exp()[:, :, None] * root_p[:, None, :]
            r = root_p.scatter_add(1, labels[:, None], -1 / root_p.gather(1, labels[:, None]))
            loss = -of_label.mean()
        return Reading(loss, r, logits, R)

    def value(self, returned: Any) -> float:
        """Return the mean cross-entropy."""
        logits, labels = returned
        _, of_label = _log_softmax(logits, labels.to(logits.device, torch.int64))
        return float(-of_label.mean())

    def weight(self, num_rows: int, num_samples: int) -> float:
        """Return 1 / b."""
        return 1 / num_samples


def _mean_square(r: Tensor) -> Tensor:
    return (r if r.device.type == "mps" else r.double()).square().mean()


def _log_softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p [b, k] and that of the labels [b, 1]."""
    log_p = torch.log_softmax(logits, dim=1)
    return log_p, log_p.gather(1, labels[:, None])


LOSSES: dict[str, type[SquaredError] | type[CrossEntropy]] = {
    "squared_error": SquaredError,
    "cross_entropy": CrossEntropy,
}
