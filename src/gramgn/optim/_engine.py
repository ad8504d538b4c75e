"""What every engine offers: the linear model of one batch, residual and Jacobian, at the current parameters.

Symbols: b samples, k residuals per sample, m trainable parameters; rows of J are (sample, residual).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gramgn.optim._call import Closure
from gramgn.optim._losses import Loss, Reading
from gramgn.optim._parameters import Trained
from gramgn.optim._precision import float64_home, full_precision_products, product_dtype


class Linearisation(Protocol):
    """r and J at the current parameters. How J is held is the engine's own affair."""

    @property
    def reading(self) -> Reading:
        """Loss and residual."""

    @property
    def num_samples(self) -> int:
        """The number of samples b."""

    @property
    def eps(self) -> float:
        """The relative precision in which J was formed."""

    def gram(self) -> Tensor:
        """Return G = J J^T of each parameter group, [groups, b k, b k] in float64, on a device that has it."""

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d [b k] in float64 for d in the shapes and the order of the parameters."""

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u, times one factor for each parameter, to tensors like the parameters, in place.

        Args:
            out: What is added to, in the shapes and the order of the parameters; may be the parameters.
            u: [b k] in float64.
            scales: A factor for each parameter.
        """


class Engine(Protocol):
    """A way of forming J."""

    def linearise(self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss) -> Linearisation:
        """Call ``closure`` once and differentiate what it returns.

        Args:
            model: The network that the closure calls exactly once.
            trained: The trainable parameters; J has a column for each entry of each.
            closure: Returns what ``loss`` reads.
            loss: Tells residual and Jacobian from what was returned.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain values, the choices that were made by measuring."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over choices, so that a resumed run computes the same."""


@dataclass(frozen=True)
class BlockLinearisation:
    """J held as one block [b k, size] for each parameter, never as one matrix.

    Attributes:
        reading: Loss and residual.
        num_samples: b.
        eps: The relative precision in which the blocks were formed.
        blocks: J by parameter.
        trained: The parameters.
    """

    reading: Reading
    num_samples: int
    eps: float
    blocks: Sequence[Tensor]
    trained: Trained

    def gram(self) -> Tensor:
        """Return the sum of block block^T by group: products in float32 or better, sum in float64."""
        n, home = len(self.blocks[0]), float64_home(self.blocks[0].device)
        G = torch.zeros(self.trained.num_groups, n, n, dtype=torch.float64, device=home)
        with full_precision_products():
            for block, group in zip(self.blocks, self.trained.groups, strict=True):
                block = block.to(product_dtype(block.dtype))
                G[group] += (block @ block.T).to(home).to(torch.float64)
        return G

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d: products in float32 or better, sum in float64."""
        first = self.blocks[0]
        product = torch.zeros(len(first), dtype=torch.float64, device=float64_home(first.device))
        with full_precision_products():
            for block, d in zip(self.blocks, direction, strict=True):
                dtype = product_dtype(block.dtype)
                product += (block.to(dtype) @ d.flatten().to(dtype)).to(product.device).to(torch.float64)
        return product

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u times the scales to ``out``."""
        with full_precision_products():
            for block, tensor, scale in zip(self.blocks, out, scales, strict=True):
                dtype = product_dtype(block.dtype)
                pulled = u.to(dtype).to(block.device) @ block.to(dtype)
                tensor.add_(pulled.view(tensor.shape), alpha=scale)
