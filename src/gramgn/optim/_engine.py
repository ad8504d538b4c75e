"""What every engine offers: the linear model of one batch, residual and Jacobian, at the current parameters.

Symbols: b samples, k residuals per sample, m trainable parameters; rows of J are (sample, residual).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gramgn.optim._precision import float64_home, full_precision_products, product_dtype

Closure = Callable[[], Any]


class Linearisation(Protocol):
    """r and J at the current parameters. How J is held is the engine's own affair."""

    @property
    def residual(self) -> Tensor:
        """The residual r as the closure returned it, detached, [b] or [b, k]."""

    @property
    def num_samples(self) -> int:
        """The number of samples b."""

    @property
    def eps(self) -> float:
        """The relative precision in which J was formed."""

    def gram(self) -> Tensor:
        """Return G = J J^T [b k, b k] in float64, on a device that has float64."""

    def vjp(self, u: Tensor) -> list[Tensor]:
        """Return J^T u for u [b k], in the shapes and the order of the parameters."""


class Engine(Protocol):
    """A way of forming J."""

    def linearise(self, model: nn.Module, params: Mapping[str, Tensor], closure: Closure) -> Linearisation:
        """Call ``closure`` once and differentiate its residuals.

        Args:
            model: The network that the closure calls exactly once.
            params: The trainable parameters by their names in the model; J has a column for each entry of
                each.
            closure: Returns the residuals [b] or [b, k].
        """


@dataclass(frozen=True)
class BlockLinearisation:
    """J held as one block [b k, size] for each parameter, never as one matrix.

    Attributes:
        residual: r, detached.
        num_samples: b.
        eps: The relative precision in which the blocks were formed.
        blocks: J by parameter.
        shapes: The parameters' shapes.
    """

    residual: Tensor
    num_samples: int
    eps: float
    blocks: Sequence[Tensor]
    shapes: Sequence[torch.Size]

    def gram(self) -> Tensor:
        """Return the sum of block block^T over parameters: products in float32 or better, sum in float64."""
        first = self.blocks[0]
        G = torch.zeros(len(first), len(first), dtype=torch.float64, device=float64_home(first.device))
        with full_precision_products():
            for block in self.blocks:
                block = block.to(product_dtype(block.dtype))
                G += (block @ block.T).to(G.device).to(torch.float64)
        return G

    def vjp(self, u: Tensor) -> list[Tensor]:
        """Return J^T u in the parameters' shapes and dtypes."""
        with full_precision_products():
            return [
                self._vjp_block(block, u).reshape(s)
                for block, s in zip(self.blocks, self.shapes, strict=True)
            ]

    @staticmethod
    def _vjp_block(block: Tensor, u: Tensor) -> Tensor:
        dtype = product_dtype(block.dtype)
        return (u.to(dtype).to(block.device) @ block.to(dtype)).to(block.dtype)
