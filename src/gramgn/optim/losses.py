"""The losses, each as a sum of squares whose linear model the optimizer solves.

b samples, k differentiated numbers (residuals or logits) per sample; rows are (sample, number).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gramgn.optim.settings import check_choice


@dataclass(frozen=True)
class Reading:
    """What the closure returned, split into its parts.

    Attributes:
        loss: The batch's loss, a scalar.
        residual: r, detached, [b] or [b, k]: the loss is a multiple of |r|^2 to second order.
        differentiated: The tensor [b] or [b, k] whose Jacobian the engines form, connected to the output.
        by_graph: Whether the closure may itself differentiate, which trial points then allow for; default False.
        root: R [b, k, k], where J is R^T times that Jacobian, sample by sample; None: the identity.
    """

    loss: Tensor
    residual: Tensor
    differentiated: Tensor
    root: Tensor | None = None
    by_graph: bool = False

    def detached(self) -> Reading:
        """Return the reading without the graph behind it."""
        return replace(self, differentiated=self.differentiated.detach())


class Loss(Protocol):
    """A loss that is a sum of squares, or has a positive semi-definite curvature with a known root."""

    def read(self, returned: Any, output: Tensor, num_samples: int) -> Reading:
        """Split what a closure returned that called the model and got `output` [b, ...].

        Raises:
            ValueError: The closure did not return what this loss needs.
        """

    def value(self, returned: Any) -> float:
        """Return the loss of what a closure returned, without a graph behind it."""

    def weight(self, num_rows: int, num_samples: int) -> float:
        """Return the factor of 1/2 |r|^2 in the model of the loss, for n = b k rows and b samples."""


DETACHED = (
    "the residuals do not depend on the model's output through autograd: return f - y from the closure, without "
    "detach, item, numpy or torch.no_grad there or in the model's forward"
)


def modelled_decrease(loss: Loss, r: Tensor, change: Tensor, num_samples: int) -> float:
    """Return the decrease of the loss that its model predicts where the residuals r [n] become r + change.

    Not computed as a difference of squares: residuals of a size 1 / sqrt(p) would drown it.
    """
    return -loss.weight(len(r), num_samples) * float(r @ change + change @ change / 2)


class SquaredError:
    """mean(r^2) over samples and outputs, without a factor 1/2 (section 2 of arXiv 1905.11675)."""

    def read(self, returned: Any, output: Tensor, num_samples: int) -> Reading:
        """Take the residuals [b] or [b, k] as they are."""
        _check_residual(returned, output, num_samples)
        r = returned.detach()
        return Reading(mean_square(r), r, returned)

    def value(self, returned: Any) -> float:
        """Return mean(r^2)."""
        return float(mean_square(returned.detach()))

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
        """Split logits [b, k] and labels [b]."""
        logits, labels = _check_logits(returned, output, num_samples)
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
        logits = logits.detach()
        _, of_label = _log_softmax(logits, labels.to(logits.device, torch.int64))
        return float(-of_label.mean())

    def weight(self, num_rows: int, num_samples: int) -> float:
        """Return 1 / b."""
        return 1 / num_samples


_EXPANDING = frozenset(f"{name}Backward0" for name in ("Add", "Sub", "Rsub", "Mul", "Div"))
"""Operations that expand their arguments to one shape."""


def _check_residual(residual: Any, output: Tensor, num_samples: int) -> None:
    """Reject anything but residuals [b] or [b, k] that depend on the output [b, ...] of the model."""
    if not isinstance(residual, Tensor):
        raise ValueError(f"the closure must return the residuals as a tensor, got {type(residual).__name__}")
    given, returned = list(output.shape), list(residual.shape)
    shapes = f"the model returned {given} for {num_samples} samples, the closure {returned}"
    if residual.ndim == 0:
        raise ValueError(
            f"the closure must return the residuals, f - y for each sample, not a loss: {shapes}"
        )
    if residual.ndim > 2 or residual.shape[0] != num_samples:
        raise ValueError(
            f"residuals must have shape [b] or [b, k] with b = {num_samples}: {shapes}. Residuals of several kinds (a "
            "penalty, other points) are terms, step(terms=[Term(residual, x), ...]); engine='rows' takes any [n]"
        )
    if (
        residual.ndim == 2
        and residual.shape[1] > max(1, output.numel() // num_samples)
        and _is_broadcast(residual)
    ):
        # [b, 1] - [b] broadcasts to [b, b].
        raise ValueError(
            f"more residuals than outputs: {shapes}. Output and target probably have shapes that broadcast "
            "(such as [b, 1] and [b]): give both the same shape"
        )
    if not residual.requires_grad:
        raise ValueError(DETACHED)


def _is_broadcast(residual: Tensor) -> bool:
    """Return whether the residuals got their shape by elementwise operations on what is smaller."""
    waiting: list[Any] = [residual.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or not node._input_metadata:
            continue
        size = math.prod(node._input_metadata[0].shape)
        inputs = [after for after, _ in node.next_functions if after is not None]
        sizes = [math.prod(each._input_metadata[0].shape) for each in inputs if each._input_metadata]
        if size == residual.numel() and len(sizes) == len(inputs):
            if node.name() in _EXPANDING and min(sizes, default=size) < size:
                return True
            if all(each == size for each in sizes):
                waiting += inputs
    return False


def _check_logits(returned: Any, output: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return logits [b, k] and labels [b], int64, and reject anything else."""
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not pair or not all(isinstance(part, Tensor) for part in returned):
        raise ValueError(
            "with loss='cross_entropy' the closure must return a pair of tensors (logits [b, k], labels [b]), "
            f"got {type(returned).__name__}"
        )
    logits, labels = returned
    shapes = f"logits {list(logits.shape)}, labels {list(labels.shape)}, {num_samples} samples"
    if logits.ndim != 2 or logits.shape[0] != num_samples or logits.shape[1] < 2:
        raise ValueError(f"logits must have shape [b, k] with k >= 2 classes: {shapes}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be whole numbers [b], one per sample: {shapes}, {labels.dtype}")
    if not logits.requires_grad:
        raise ValueError(
            "the logits do not depend on the model's output through autograd: return them from the closure "
            "without detach, numpy or torch.no_grad"
        )
    if bool(((labels < 0) | (labels >= logits.shape[1])).any()):
        raise ValueError(
            f"labels must lie in 0 to {logits.shape[1] - 1}, one less than the number of logits; got "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    return logits, labels.to(logits.device, torch.int64)


def mean_square(r: Tensor) -> Tensor:
    """Return mean(r^2), in float64 where the device has it."""
    return (r if r.device.type == "mps" else r.double()).square().mean()


def _log_softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p [b, k] and that of the labels [b, 1]."""
    log_p = torch.log_softmax(logits, dim=1)
    return log_p, log_p.gather(1, labels[:, None])


LOSSES: dict[str, type[SquaredError] | type[CrossEntropy]] = {
    "squared_error": SquaredError,
    "cross_entropy": CrossEntropy,
}


def make_loss(name: Any) -> Loss:
    """Return the loss called `name`."""
    return LOSSES[check_choice("loss", name, tuple(LOSSES))]()
