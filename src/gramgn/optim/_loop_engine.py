"""The oracle: one backward pass for every row of J. Slow, and right for all that autograd differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim._call import Forward, call_closure
from gramgn.optim._engine import BlockLinearisation, Closure
from gramgn.optim._precision import jacobian_eps


class LoopEngine:
    """Forms J row by row from the graph of one ordinary forward pass."""

    def linearise(
        self, model: nn.Module, params: Mapping[str, Tensor], closure: Closure
    ) -> BlockLinearisation:
        """Call ``closure`` once and differentiate each of its residuals; see ``Engine``."""
        residual, _, num_samples = call_closure(model, closure, _plain_forward)
        tensors = list(params.values())
        rows = residual.flatten()
        blocks = [param.new_empty(len(rows), param.numel()) for param in tensors]
        for i, row in enumerate(rows):
            slopes = torch.autograd.grad(
                row, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for block, slope in zip(blocks, slopes, strict=True):
                block[i] = slope.flatten()
        return BlockLinearisation(
            residual=residual.detach(),
            num_samples=num_samples,
            eps=jacobian_eps(model, tensors[0].dtype, tensors[0].device),
            blocks=blocks,
            shapes=[param.shape for param in tensors],
        )


def _plain_forward(original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Run the model as it is; the batch is the leading dimension of its output."""
    output = original(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
    return output, output.shape[0] if output.ndim else 1
