"""The Jacobian J of one batch and its Gram matrix G = J J^T: what every engine offers.

b samples, k residuals per sample, m trainable parameters; the n = b k rows of J are (sample, residual).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gramgn.optim.closure import Closure, Trained
from gramgn.optim.kernels import OFF
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.runtime import float64_home, full_precision_products, product_dtype, zero_gram


class Linearisation(Protocol):
    """The residuals r and their Jacobian J at the current parameters; each engine holds J in its own way."""

    @property
    def reading(self) -> Reading:
        """Loss and residuals."""

    @property
    def num_samples(self) -> int:
        """The number of samples b."""

    @property
    def eps(self) -> float:
        """The relative precision in which J was formed."""

    def gram(self) -> Tensor:
        """Return G = J J^T by parameter group, [groups, n, n] in float64 and exactly symmetric.

        On the device of the parameters, or on the CPU where that device has no float64.
        """

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d [n] in float64 for d in the shapes and the order of the parameters."""

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u, times one factor per parameter, to tensors like the parameters, in place.

        Args:
            out: The tensors that are added to, in the shapes and the order of the parameters; may be the parameters.
            u: [n] in float64.
            scales: A factor per parameter.
        """

    def write_rows_(self, out: Sequence[Tensor]) -> None:
        """Write J into matrices [n, size], one per parameter in their order, in place.

        Args:
            out: The matrices; their rows may be strided.
        """


class Engine(Protocol):
    """A way of forming J. An engine that makes no choices inherits all but `linearise`."""

    def kernels_form(self) -> str:
        """Return the form of the compiled kernels in use, see `gramgn.optim.kernels`, or `"off"`."""
        return OFF

    def linearise(self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss) -> Linearisation:
        """Call `closure` once and differentiate what it returns.

        Args:
            model: The network, which the closure calls.
            trained: The trainable parameters; J has a column per entry of each.
            closure: Returns what `loss` reads.
            loss: Reads residuals and Jacobian from what was returned.
        """

    def evaluating(self, model: nn.Module, trained: Trained) -> AbstractContextManager[None]:
        """Return a context in which closures are called for the loss alone."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain values, the choices that were made by measuring."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load such choices, so that a resumed run computes the same."""
        return


@dataclass(frozen=True)
class BlockLinearisation:
    """J held as one block [n, size] per parameter, never as one matrix.

    Attributes:
        reading: Loss and residuals.
        num_samples: The number of samples b.
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
        """Return G by group: products in float32 or better, their sum in float64."""
        first = self.blocks[0]
        G = zero_gram(self.trained.num_groups, len(first), first.device)
        with full_precision_products():
            for block, group in zip(self.blocks, self.trained.groups, strict=True):
                J = block.to(product_dtype(block.dtype))
                # G = sum over parameters of J J^T
                G[group] += (J @ J.T).to(G.device).to(torch.float64)
        return symmetric(G)

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d: products in float32 or better, their sum in float64."""
        first = self.blocks[0]
        product = torch.zeros(len(first), dtype=torch.float64, device=float64_home(first.device))
        with full_precision_products():
            for block, d in zip(self.blocks, direction, strict=True):
                dtype = product_dtype(block.dtype)
                product += (block.to(dtype) @ d.flatten().to(dtype)).to(product.device).to(torch.float64)
        return product

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u times the scales to `out`."""
        with full_precision_products():
            for block, tensor, scale in zip(self.blocks, out, scales, strict=True):
                dtype = product_dtype(block.dtype)
                pulled = u.to(dtype).to(block.device) @ block.to(dtype)
                tensor.add_(pulled.view(tensor.shape), alpha=scale)

    def write_rows_(self, out: Sequence[Tensor]) -> None:
        """Write J into `out`."""
        for block, matrix in zip(self.blocks, out, strict=True):
            matrix.copy_(block)


def symmetric(G: Tensor) -> Tensor:
    """Return (G + G^T) / 2 of one or several matrices.

    Not every library's product of a matrix and its own transpose is symmetric to the last bit. Where it is, this
    changes no bit.
    """
    return (G + G.mT).mul_(0.5)
