"""How one parameter's part of the Jacobian is stored: as rows, or as outer products that are never expanded.

b samples, k residuals per sample, T places (tokens, positions) per sample, F output features. Rows of J are
ordered by (sample, residual).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramgn.optim.runtime import product_dtype
from gramgn.optim.stream.products import Products


class Buffers:
    """Memory that is reused in the next step, because allocating it costs more than filling it.

    Holds flat tensors by name, which grow when a larger one is requested. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._flat: dict[Hashable, Tensor] = {}
        self._kept: dict[str, Tensor] = {}

    def keep(self, blocks: Mapping[str, Tensor]) -> None:
        """Hold the blocks of a finished step until the next step forms its own."""
        self._kept = dict(blocks)

    def free(self, names: Iterable[str]) -> None:
        """Release the last step's blocks just before new ones of the same sizes are allocated."""
        for name in names:
            self._kept.pop(name, None)

    def get(self, name: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised contiguous tensor like `like` in the memory called `name`."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != like.dtype or flat.device != like.device:
            flat = self._flat[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return flat[:size].view(shape)

    def nbytes(self) -> int:
        """Return the size of the memory that was given out."""
        return sum(flat.nbytes for flat in self._flat.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_flat": {}, "_kept": {}}


@dataclass(frozen=True)
class Memory:
    """Memory for forming the block of one parameter.

    Attributes:
        buffers: Scratch memory.
        rows: Given parts, size and a tensor that determines dtype and device, returns uninitialised memory
            [parts, b, size] for the block.
        products: The arithmetic to use.
    """

    buffers: Buffers
    rows: Callable[[int, int, Tensor], Tensor]
    products: Products


@dataclass(frozen=True)
class Layout:
    """The order in which the entries of one row lie in memory.

    G does not depend on the order of a parameter's entries, so a rule returns its block in the order in which it
    was computed, together with a layout that recovers the parameter's shape. This saves a copy.
    """

    sizes: tuple[int, ...]  # the dimensions of the entries as they lie in memory
    order: tuple[int, ...]  # their permutation that gives the parameter's shape

    def to_param(self, flat: Tensor) -> Tensor:
        """Return a row in the parameter's shape."""
        return flat.view(self.sizes).permute(self.order)

    def from_param(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as a row."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return tensor.permute(inverse).reshape(-1)


FLAT, SCALAR = Layout((-1,), (0,)), Layout((), ())


@dataclass(frozen=True)
class Block:
    """Per-sample gradients of one parameter. The entries of a row may be split into several parts."""

    rows: Tensor  # [parts, b, size]
    layout: Layout  # the place of each entry of [parts, size] in the parameter

    def relaid(self, layout: Layout) -> Tensor:
        """Return the rows in another layout, as [1, b, size]."""
        parts, b, size = self.rows.shape
        flat = self.rows.transpose(0, 1).reshape(b, parts * size)
        return torch.stack([layout.from_param(self.layout.to_param(row)) for row in flat])[None]


Blocks = Mapping[str, Tensor | Block]
"""Blocks or gradients [b, *shape], keyed by the parameters' names in their module."""


def as_block(gradients: Tensor) -> Block:
    """Return gradients [b, *shape] as a block whose rows keep their order in memory."""
    if gradients.ndim <= 2:
        return Block(gradients.reshape(1, len(gradients), -1), FLAT if gradients.ndim == 2 else SCALAR)
    dims = sorted(range(1, gradients.ndim), key=gradients.stride, reverse=True)
    sizes = tuple(gradients.shape[d] for d in dims)
    order = tuple(dims.index(d) for d in range(1, gradients.ndim))
    return Block(gradients.permute(0, *dims).reshape(1, len(gradients), -1), Layout(sizes, order))


@dataclass
class LinearFactors:
    """A linear layer, or a convolution as a linear layer of patches.

    Row (i, j) of the weight is sum_t D[i, j, t] A[i, t]^T; of the bias, sum_t D[i, j, t].
    """

    A: Tensor  # inputs [b, T, in]
    D: Tensor  # output gradients [b, k, T, F]
    weight: str | None  # its name in the model; None if it is not trained
    bias: str | None  # its name; None if there is none or it is not trained
    layout: Layout | None = None  # the place of each entry of [F, in] in the weight; None: there

    def names(self) -> list[str]:
        """Return the names of the parameters."""
        return [name for name in (self.weight, self.bias) if name]

    def bounds(self) -> dict[str, Tensor]:
        """Return upper bounds of the norms of the blocks, 0 where a block is."""
        D = torch.linalg.vector_norm(self.D)
        of_weight = {self.weight: D * torch.linalg.vector_norm(self.A)} if self.weight else {}
        return of_weight | ({self.bias: D} if self.bias else {})

    def gram(self, products: Products) -> Tensor:
        """Return the sum over pairs of places of (A A^T + 1) o (D D^T); the 1 is the bias."""

        def similarity(rows: slice) -> Tensor:
            if self.weight is None:
                return self.A.new_ones(())
            of_inputs = _pairs(_product(self.A), rows, products)
            return of_inputs.add_(1) if self.bias else of_inputs

        return _gram(self.D, similarity, products)

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over places of D . (W A + c) for a direction (W, c)."""
        dtype = product_dtype(self.D.dtype)
        change = self.D.new_zeros((), dtype=dtype)
        if self.weight:
            change = _product(self.A) @ self._matrix(direction[self.weight].to(dtype)).T
        if self.bias:
            change = change + direction[self.bias].to(dtype)
        return (_product(self.D) * (change.unsqueeze(1) if change.ndim > 1 else change)).sum(dim=(2, 3))

    def add_vjp_(
        self, out: Mapping[str, Tensor], D: Tensor, scales: Mapping[str, float], products: Products
    ) -> None:
        """Add D^T A and the sum of D, times their scales, for D [b T, F] from `weighted`."""
        if self.weight:
            A, weight = _product(self.A).flatten(end_dim=1), out[self.weight]
            by_torch = weight.dtype == A.dtype and not products.is_fast(len(A) * weight.numel(), D, A)
            if by_torch and not self.layout:
                weight.addmm_(D.T, A, alpha=scales[self.weight])
            else:
                pulled = products.transposed_times(D, A)
                pulled = self.layout.to_param(pulled.flatten()) if self.layout else pulled
                weight.add_(pulled, alpha=scales[self.weight])
        if self.bias:
            out[self.bias].add_(D.sum(dim=0), alpha=scales[self.bias])

    def _matrix(self, weight: Tensor) -> Tensor:
        """Return the entries of the weight as [F, in]."""
        return self.layout.from_param(weight).view(len(weight), -1) if self.layout else weight

    def write_rows_(self, name: str, out: Tensor) -> None:
        """Write the block of a parameter into a matrix [b k, size]."""
        b, k, _, F = self.D.shape
        if name == self.bias:
            out.copy_(self.D.sum(dim=2).view(b * k, F))
        else:
            out.copy_((self.D.transpose(2, 3) @ self.A.unsqueeze(1)).view(b * k, -1))


@dataclass
class EmbeddingFactors:
    """An embedding table. Row (i, j) holds D[i, j, t] at entry tokens[i, t], summed over places t."""

    tokens: Tensor  # the entries that were read, int64 [b, T]
    D: Tensor  # output gradients [b, k, T, F]
    weight: str  # the table's name in the model

    def names(self) -> list[str]:
        """Return the name of the table."""
        return [self.weight]

    def bounds(self) -> dict[str, Tensor]:
        """Return an upper bound of the norm of the block, 0 where it is."""
        return {self.weight: torch.linalg.vector_norm(self.D)}

    def gram(self, products: Products) -> Tensor:
        """Return the sum of D D^T over pairs of places that read the same entry."""
        dtype = product_dtype(self.D.dtype)

        def similarity(rows: slice) -> Tensor:
            return (self.tokens[rows][:, :, None, None] == self.tokens[None, None]).to(dtype)

        return _gram(self.D, similarity, products)

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over places of D . (entry read)."""
        read = direction[self.weight].to(product_dtype(self.D.dtype))[self.tokens]
        return (_product(self.D) * read.unsqueeze(1)).sum(dim=(2, 3))

    def add_vjp_(
        self, out: Mapping[str, Tensor], D: Tensor, scales: Mapping[str, float], _: Products
    ) -> None:
        """Add D [b T, F] from `weighted`, times the scale, to the entries that were read."""
        table = out[self.weight]
        table.index_add_(0, self.tokens.flatten(), D.to(table.dtype), alpha=scales[self.weight])

    def write_rows_(self, name: str, out: Tensor) -> None:
        """Write the block of the table into a matrix [b k, size]."""
        b, k, _, F = self.D.shape
        table = out.new_zeros(b, k, out.shape[1] // F, F)
        entries = self.tokens[:, None, :, None].expand_as(self.D)
        out.copy_(table.scatter_add_(2, entries, self.D.to(out.dtype)).view(b * k, -1))


Factors = LinearFactors | EmbeddingFactors


def joined(parts: Sequence[Factors]) -> Factors:
    """Return the factors of consecutive ranges of samples as the factors of the whole batch."""
    first = parts[0]
    if len(parts) == 1:
        return first
    D = torch.cat([part.D for part in parts])
    if isinstance(first, EmbeddingFactors):
        tokens = torch.cat([part.tokens for part in parts if isinstance(part, EmbeddingFactors)])
        return EmbeddingFactors(tokens, D, first.weight)
    A = torch.cat([part.A for part in parts if isinstance(part, LinearFactors)])
    return LinearFactors(A, D, first.weight, first.bias, first.layout)


def is_cheaper(b: int, k: int, T: int, num_inputs: int, num_outputs: int) -> bool:
    """Return whether a linear layer takes fewer multiplications as factors than as a block."""
    as_factors = (b * T) ** 2 * num_inputs + (b * k * T) ** 2 * (num_outputs + 1)
    as_rows = (b * k * T + (b * k) ** 2) * num_inputs * num_outputs
    return T == 1 or as_factors < as_rows


def _gram(D: Tensor, similarity: Callable[[slice], Tensor], products: Products) -> Tensor:
    """Return the sum over t, s of similarity[i, t, i', s] D[i, j, t] . D[i', j', s] as [b k, b k]."""
    D = _product(D)
    b, k, T, _ = D.shape
    if T == 1:
        pairs = _pairs(D[:, :, 0], slice(None), products)
        return pairs.mul_(similarity(slice(None))).view(b * k, b * k)
    step = max(1, products.most_pairs // (b * k * k * T * T))
    gram = D.new_empty(b, k, b, k)

    def write(rows: slice) -> None:
        pairs = _pairs(D, rows, products)  # [i, j, t, i', j', s]
        same = similarity(rows)
        if same.ndim:
            same = same[:, None, :, :, None, :]
        pairs *= same
        torch.sum(pairs, dim=(2, 5), out=gram[rows])

    for start in range(0, b, step):
        write(slice(start, min(start + step, b)))
    return gram.view(b * k, b * k)


def _pairs(X: Tensor, rows: slice, products: Products) -> Tensor:
    """Return the inner products of the vectors X[i, ...], along the last dimension, for i in `rows` with all others."""
    left, all_ = X[rows], X.reshape(-1, X.shape[-1])
    whole = len(left) == len(X)
    product = products.inner_products(all_) if whole else left.reshape(-1, X.shape[-1]) @ all_.T
    return product.view(*left.shape[:-1], *X.shape[:-1])


def weighted(factors: Factors, u: Tensor) -> Tensor:
    """Return the sum over residuals of u D, [b T, F], for u [b, k]."""
    D = _product(factors.D)
    u = u.to(D.device, D.dtype)
    summed = D[:, 0] * u[:, :, None] if D.shape[1] == 1 else torch.einsum("bk,bktf->btf", u, D)
    return summed.flatten(end_dim=1)


def _product(factor: Tensor) -> Tensor:
    return factor.to(product_dtype(factor.dtype))
