"""The oracle: one backward pass for every row of J. Slow, and right for all that autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.closure import Closure, Forward, Trained, call_closure
from gramgn.optim.gram import BlockLinearisation
from gramgn.optim.losses import Loss
from gramgn.optim.runtime import jacobian_eps


class LoopEngine:
    """Forms J row by row from the graph of one ordinary forward pass."""

    def linearise(
        self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss
    ) -> BlockLinearisation:
        """Call ``closure`` once and differentiate each of its residuals; see ``Engine``."""
        reading, num_samples = call_closure(model, closure, loss, plain_forward)
        tensors = list(trained.params.values())
        rows = reading.differentiated.flatten()
        blocks = [param.new_empty(len(rows), param.numel()) for param in tensors]
        for i, row in enumerate(rows):
            slopes = torch.autograd.grad(
                row, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for block, slope in zip(blocks, slopes, strict=True):
                block[i] = slope.flatten()
        if reading.root is not None:
            R = reading.root.mT
            blocks = [(R @ block.view(*R.shape[:2], -1)).flatten(end_dim=1) for block in blocks]
        return BlockLinearisation(
            reading=reading.detached(),
            num_samples=num_samples,
            eps=jacobian_eps(model, tensors[0].dtype, tensors[0].device),
            blocks=blocks,
            trained=trained,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: this engine makes no choices."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def plain_forward(original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Run the model as it is; the batch is the leading dimension of its output."""
    output = original(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
    return output, output.shape[0] if output.ndim else 1
