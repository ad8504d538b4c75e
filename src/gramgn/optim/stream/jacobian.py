"""The Jacobian as the streaming engine returns it: held as blocks, or recomputed through the graph.

b samples, k residuals and q outputs per sample; rows of J are ordered by (sample, residual). A `Jacobian` takes and
returns vectors in parameter space as tensors by parameter name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gramgn.optim.closure import Trained
from gramgn.optim.gram import symmetric
from gramgn.optim.losses import Reading
from gramgn.optim.runtime import full_precision_products, product_dtype
from gramgn.optim.stream.accumulate import Accumulator, rows_times_vector, to_float64
from gramgn.optim.stream.blocks import Layout, weighted

NO_ROWS = "the rows of J are wanted, which a memory_budget that cannot hold J drops: leave it out"


@dataclass(frozen=True)
class StreamLinearisation:
    """r and J; see `Linearisation`."""

    reading: Reading
    num_samples: int
    eps: float
    trained: Trained
    jacobian: Jacobian

    def gram(self) -> Tensor:
        """Return G = J J^T of each parameter group, [groups, b k, b k]."""
        return self.jacobian.gram()

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d, [b k]."""
        return self.jacobian.jvp(self._named(direction))

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Add J^T u, scaled per parameter, to `out`."""
        by_name = dict(zip(self.trained.params, scales, strict=True))
        self.jacobian.add_vjp_(self._named(out), u, by_name)

    def write_rows_(self, out: Sequence[Tensor]) -> None:
        """Write J into `out`."""
        self.jacobian.write_rows_(self._named(out))

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.trained.params, tensors, strict=True))


@dataclass(frozen=True)
class HeldJacobian:
    """J held by layer, as rows or as outer products."""

    accumulated: Accumulator

    def gram(self) -> Tensor:
        """Return G."""
        return self.accumulated.G

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return J d."""
        parts = self.accumulated
        product = torch.zeros(parts.b * parts.k, dtype=torch.float64, device=parts.G.device)
        with full_precision_products():
            for factors in parts.factors.values():
                product += to_float64(factors.jvp(direction)).flatten()
            for name, held in parts.held.items():
                d = held.layout.from_param(direction[name]).view(len(held.rows), -1)
                product += rows_times_vector(held.rows, d)
            for blocks in parts.small:
                d = torch.cat(
                    [
                        layout.from_param(direction[name])
                        for name, layout in zip(blocks.names, blocks.layouts, strict=True)
                    ]
                )
                product += rows_times_vector(blocks.rows, d[None])
        return product

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u, scaled per parameter, to `out`."""
        parts = self.accumulated
        dtypes = {tensor.dtype for tensor in out.values()}
        if len(dtypes) == 1:
            # Once, and not for each parameter.
            first = next(iter(out.values()))
            u = u.to(first.device, product_dtype(first.dtype))
        with full_precision_products():
            # Everything that allocates memory precedes the first change of a parameter.
            of_factors = [(each, weighted(each, u.view(parts.b, parts.k))) for each in parts.factors.values()]
            pulled: dict[str, Tensor] = {}
            for name, held in parts.held.items():
                pulled[name] = held.layout.to_param(parts.products.vector_times_rows(u, held.rows).flatten())
            for blocks in parts.small:
                pulled |= blocks.pulled(u, parts.products)
            for factors, D in of_factors:
                factors.add_vjp_(out, D, scales, parts.products)
        by_scale: dict[float, list[str]] = {}
        for name in pulled:
            by_scale.setdefault(scales[name], []).append(name)
        for scale, names in by_scale.items():
            torch._foreach_add_([out[name] for name in names], [pulled[name] for name in names], alpha=scale)

    def write_rows_(self, out: Mapping[str, Tensor]) -> None:
        """Write J into matrices [b k, size]."""
        parts, missing = self.accumulated, dict(out)
        n = parts.b * parts.k
        for factors in parts.factors.values():
            for name in factors.names():
                factors.write_rows_(name, missing.pop(name))
        for name, held in parts.held.items():
            missing.pop(name).copy_(_unfolded(held.rows.transpose(0, 1).reshape(n, -1), held.layout))
        for blocks in parts.small:
            several = zip(
                blocks.names, blocks.layouts, blocks.rows[0].split(blocks.sizes, dim=1), strict=True
            )
            for name, layout, rows in several:
                missing.pop(name).copy_(_unfolded(rows, layout))
        for matrix in missing.values():
            matrix.zero_()


def _unfolded(rows: Tensor, layout: Layout) -> Tensor:
    """Return rows [n, size] in the order of the parameter's entries."""
    return (
        rows.unflatten(1, layout.sizes or (1,)).permute(0, *(i + 1 for i in layout.order or (0,))).flatten(1)
    )


@dataclass(frozen=True)
class ChainedJacobian:
    """J = S J_f: the Jacobian of the outputs, followed by the derivative of the residuals in the outputs.

    Attributes:
        outputs: J_f, with rows (sample, output).
        slopes: S [b, k, q] in float64, each sample's residuals by its own outputs.
    """

    outputs: Jacobian
    slopes: Tensor

    def gram(self) -> Tensor:
        """Return S G_f S^T."""
        return chained_gram(self.outputs.gram(), self.slopes)

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return S J_f d."""
        b, _, q = self.slopes.shape
        return torch.einsum("bkq,bq->bk", self.slopes, self.outputs.jvp(direction).view(b, q)).flatten()

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J_f^T S^T u, scaled per parameter, to `out`."""
        b, k, _ = self.slopes.shape
        pulled = torch.einsum("bkq,bk->bq", self.slopes, u.to(self.slopes.device).view(b, k))
        self.outputs.add_vjp_(out, pulled.flatten(), scales)

    def write_rows_(self, out: Mapping[str, Tensor]) -> None:
        """Write S J_f into matrices [b k, size]."""
        b, k, q = self.slopes.shape
        of_outputs = {name: rows.new_empty(b * q, rows.shape[1]) for name, rows in out.items()}
        self.outputs.write_rows_(of_outputs)
        with full_precision_products():
            for name, rows in out.items():
                slopes = self.slopes.to(rows.device, rows.dtype)
                rows.copy_((slopes @ of_outputs.pop(name).view(b, q, -1)).view(b * k, -1))


def chained_gram(G: Tensor, slopes: Tensor) -> Tensor:
    """Return S G_f S^T by group, for G_f [groups, b q, b q] and S [b, k, q]."""
    groups, (b, k, q) = len(G), slopes.shape
    if not G.numel():
        return G
    half = torch.einsum("ikq,giqjr->gikjr", slopes, G.view(groups, b, q, b, q))
    return symmetric(torch.einsum("gikjr,jlr->gikjl", half, slopes).reshape(groups, b * k, b * k))


@dataclass(frozen=True)
class GraphJacobian:
    """J that is not held: its blocks were dropped after summing G, and products traverse the graph again."""

    G: Tensor  # of each parameter group
    output: Tensor  # the model's output with its graph
    slopes: Tensor  # dr/df [b, k, q]
    params: Mapping[str, Tensor]  # the trained parameters by name

    def gram(self) -> Tensor:
        """Return G."""
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
                "With a memory_budget that J does not fit into, momentum and weight decay inside the solve need second "
                "derivatives, which not all layers provide: lower it, so that J is formed in groups, or raise it."
            )
            raise
        return product.to(self.G.device, torch.float64).flatten()

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u, scaled per parameter, to `out`, by one backward pass weighted by u."""
        b, k, _ = self.slopes.shape
        pulled = self._pulled(u.to(self.slopes.device, self.slopes.dtype).view(b, k), create_graph=False)
        for name, grad in pulled.items():
            if grad is not None:
                out[name].add_(grad, alpha=scales[name])

    def write_rows_(self, out: Mapping[str, Tensor]) -> None:
        """Reject it: the rows were dropped."""
        raise ValueError(NO_ROWS)

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
        return {
            name: grad.to_dense() if grad is not None and grad.is_sparse else grad
            for name, grad in zip(self.params, grads, strict=True)
        }


class Jacobian(Protocol):
    """J as something provides it."""

    def gram(self) -> Tensor:
        """Return G of each parameter group."""

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return J d."""

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u, scaled per parameter, to `out`."""

    def write_rows_(self, out: Mapping[str, Tensor]) -> None:
        """Write J into matrices [b k, size]."""
