"""What the streaming engine returns: J that is held, J that is pulled through the graph, and the last slopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gramgn.optim.closure import Trained
from gramgn.optim.losses import Reading


class Jacobian(Protocol):
    """J, with vectors in the parameters' space by name."""

    def gram(self) -> Tensor:
        """Return G by group, [groups, n, n] in float64."""

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return J d [n] in float64."""

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u times the scales, u [n] in float64."""


@dataclass(frozen=True)
class StreamLinearisation:
    """r and J; see ``Linearisation``.

    Attributes:
        reading: Loss and residual.
        num_samples: b.
        eps: The relative precision in which J was formed.
        trained: The parameters.
        jacobian: J.
    """

    reading: Reading
    num_samples: int
    eps: float
    trained: Trained
    jacobian: Jacobian

    def gram(self) -> Tensor:
        """Return G = J J^T by group."""
        return self.jacobian.gram()

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d [b k]."""
        return self.jacobian.jvp(self._named(direction))

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u times the scales to ``out``."""
        by_name = dict(zip(self.trained.params, scales, strict=True))
        self.jacobian.add_vjp_(self._named(out), u, by_name)

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.trained.params, tensors, strict=True))


@dataclass(frozen=True)
class ChainedJacobian:
    """S J_f: the Jacobian of the outputs, and what the residuals make of them.

    Attributes:
        outputs: J_f, rows (sample, output).
        slopes: S [b, k, q] in float64, each sample's residuals by its own outputs.
    """

    outputs: Jacobian
    slopes: Tensor

    def gram(self) -> Tensor:
        """Return S G_f S^T."""
        G = self.outputs.gram()
        groups, (b, k, q) = len(G), self.slopes.shape
        half = torch.einsum("ikq,giqjr->gikjr", self.slopes, G.view(groups, b, q, b, q))
        return torch.einsum("gikjr,jlr->gikjl", half, self.slopes).reshape(groups, b * k, b * k)

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return S J_f d."""
        b, _, q = self.slopes.shape
        return torch.einsum("bkq,bq->bk", self.slopes, self.outputs.jvp(direction).view(b, q)).flatten()

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J_f^T S^T u."""
        b, k, _ = self.slopes.shape
        pulled = torch.einsum("bkq,bk->bq", self.slopes, u.to(self.slopes.device).view(b, k))
        self.outputs.add_vjp_(out, pulled.flatten(), scales)


@dataclass(frozen=True)
class GraphJacobian:
    """J that is not held: G was summed and the blocks dropped, products go through the graph once more.

    Attributes:
        G: The Gram matrices by group.
        output: The model's output with its graph.
        slopes: dr/df [b, k, q].
        params: The trained parameters by name.
    """

    G: Tensor
    output: Tensor
    slopes: Tensor
    params: Mapping[str, Tensor]

    def gram(self) -> Tensor:
        """Return G by group."""
        return self.G

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return J d as the derivative of <J^T v, d> in v."""
        b, k, _ = self.slopes.shape
        try:
            with torch.enable_grad():
                v = self.slopes.new_zeros(b, k, requires_grad=True)
                pulled = self._pulled(v, create_graph=True)
                terms = [(grad * direction[name]).sum() for name, grad in pulled.items() if grad is not None]
                (product,) = torch.autograd.grad(
                    torch.stack(terms).sum(), v, allow_unused=True, materialize_grads=True
                )
        except RuntimeError as error:
            error.add_note(
                "With low_memory=True, momentum and weight decay inside of the solve need second derivatives, "
                "which not all layers have; take low_memory=False."
            )
            raise
        return product.to(self.G.device, torch.float64).flatten()

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u by one backward pass with u as weights."""
        b, k, _ = self.slopes.shape
        pulled = self._pulled(u.to(self.slopes.device, self.slopes.dtype).view(b, k), create_graph=False)
        for name, grad in pulled.items():
            if grad is not None:
                out[name].add_(grad, alpha=scales[name])

    def _pulled(self, v: Tensor, *, create_graph: bool) -> dict[str, Tensor | None]:
        weights = torch.einsum("bk,bkq->bq", v, self.slopes).reshape(self.output.shape)
        grads = torch.autograd.grad(
            self.output,
            list(self.params.values()),
            weights.to(self.output.dtype),
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
        return dict(zip(self.params, grads, strict=True))
