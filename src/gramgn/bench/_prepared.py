"""A path that is ready to take steps, and the one formula for packages that only give per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SMALL = 64
SGD_LR = 1e-6
"""So small that weights stay where they are while steps are timed."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class Prepared:
    """A path on its own copy of the network.

    Attributes:
        step: Takes one step.
        model: The network that it moves.
    """

    step: Callable[[], object]
    model: nn.Module


def gram_update(
    params: Sequence[Tensor], blocks: Sequence[Tensor], residual: Tensor, alpha_sum: float, lr: float
) -> None:
    """Move ``params`` by -lr J^T (J J^T + alpha_sum I)^-1 r: Algorithm 1 of arXiv 1905.11675, lam = 1.

    Products in the blocks' dtype, their sum and the solve in float64, as in our own optimizer.

    Args:
        params: The trained parameters.
        blocks: Per-sample gradients of the outputs [b, *shape] for each.
        residual: r [b].
        alpha_sum: The damping beside the sum J J^T.
        lr: Factor on the step.
    """
    flat = [block.flatten(start_dim=1) for block in blocks]
    small = [block for block in flat if block.shape[1] <= SMALL]
    # A product for each scalar would cost more in calls than in arithmetic.
    products = [block for block in flat if block.shape[1] > SMALL] + ([torch.cat(small, 1)] if small else [])
    G = torch.zeros(len(residual), len(residual), dtype=torch.float64, device=residual.device)
    for block in products:
        G += block @ block.T
    G.diagonal().add_(alpha_sum)
    u = torch.cholesky_solve(residual.double()[:, None], torch.linalg.cholesky(G))[:, 0]
    u = (lr * u).to(residual.dtype)
    for param, block in zip(params, flat, strict=True):
        param.sub_((u @ block).view_as(param))
