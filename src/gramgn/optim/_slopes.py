"""The closure's part of the chain: the residuals by the model's outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gramgn.optim._losses import Reading
from gramgn.optim._precision import is_capturing


def slopes_of(reading: Reading, outputs: Tensor, model: nn.Module) -> Tensor:
    """Return [b, k, q]: each sample's residuals (R^T times its logits) by its own q outputs.

    Raises:
        ValueError: A residual depends on the output of another sample, or on parameters not through the
            outputs.
    """
    slopes = _slopes(reading.differentiated, outputs, model)
    return slopes if reading.root is None else reading.root.mT.to(slopes.dtype) @ slopes


def _slopes(differentiated: Tensor, outputs: Tensor, model: nn.Module) -> Tensor:
    r = differentiated.reshape(len(differentiated), -1)
    others = [param for param in model.parameters() if param.requires_grad]
    grads = [
        torch.autograd.grad(column.sum(), [outputs, *others], retain_graph=True, allow_unused=True)
        for column in r.unbind(dim=1)
    ]
    if any(grad is not None for column in grads for grad in column[1:]):
        raise ValueError(
            "the residuals depend on parameters other than through the model's output; put everything that "
            "is trained inside of model(...), or take engine='loop'"
        )
    slopes = torch.stack([column[0].reshape(len(r), -1) for column in grads], dim=1)
    if not is_capturing():
        _check_own_sample(r, outputs, slopes)
    return slopes


def _check_own_sample(r: Tensor, outputs: Tensor, slopes: Tensor) -> None:
    """Refuse residuals that mix samples: weights on rows must come back as weights on slopes, row by row."""
    # Multiples of the golden ratio, modulo 1, keep near and far rows apart without drawing random numbers.
    index = torch.arange(r.numel(), dtype=torch.float32, device=r.device)
    weights = (1 + (index * 0.618034) % 1).reshape(r.shape).to(r.dtype)
    (mixed,) = torch.autograd.grad((r * weights).sum(), outputs)
    own = torch.einsum("bk,bkq->bq", weights.to(slopes.dtype), slopes)
    error, scale = (mixed.reshape(own.shape) - own).abs().max(), slopes.abs().max()
    if error > torch.finfo(slopes.dtype).eps ** 0.5 * scale:
        raise ValueError(
            "a residual depends on the output of another sample (such as f - f.mean()); each must depend on "
            "its own sample only, or take engine='loop'"
        )
