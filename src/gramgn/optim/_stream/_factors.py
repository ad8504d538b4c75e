"""Blocks that stay outer products: linear layers and embeddings. J's part is never formed.

b samples, k residuals a sample, T places (tokens, positions) a sample, F output features; rows (sample,
residual).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.optim.runtime import product_dtype

MOST_PAIRS = 2**24
"""Of (sample, place) with (sample, place) that are multiplied at a time."""


@dataclass
class LinearFactors:
    """A linear layer: row (i, j) is the sum over places t of D[i, j, t] A[i, t]^T, D[i, j, t] for the bias.

    Attributes:
        A: Inputs [b, T, in].
        D: Output gradients [b, k, T, F].
        weight: The weight's name in the model; None: not trained.
        bias: The bias's name.
    """

    A: Tensor
    D: Tensor
    weight: str | None
    bias: str | None

    def gram(self) -> Tensor:
        """Sum (A A^T + 1) o (D D^T) over pairs of places, the 1 for the bias."""

        def similarity(rows: slice) -> Tensor:
            if self.weight is None:
                of_inputs = self.A.new_zeros(())
            else:
                A = _product(self.A)
                of_inputs = torch.tensordot(A[rows], A, dims=([2], [2]))
            return of_inputs + 1 if self.bias else of_inputs

        return _gram(self.D, similarity)

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over places of D . (W A + c)."""
        dtype = product_dtype(self.D.dtype)
        change = self.D.new_zeros((), dtype=dtype)
        if self.weight:
            change = _product(self.A) @ direction[self.weight].to(dtype).T
        if self.bias:
            change = change + direction[self.bias].to(dtype)
        return (_product(self.D) * (change.unsqueeze(1) if change.ndim > 1 else change)).sum(dim=(2, 3))

    def add_vjp_(self, out: Mapping[str, Tensor], D: Tensor, scales: Mapping[str, float]) -> None:
        """Add D^T A and the sum of D, weighted by u, [b T, F], times the scales."""
        if self.weight:
            A, weight = _product(self.A).flatten(end_dim=1), out[self.weight]
            if weight.dtype == A.dtype:
                weight.addmm_(D.T, A, alpha=scales[self.weight])
            else:
                weight.add_(D.T @ A, alpha=scales[self.weight])
        if self.bias:
            out[self.bias].add_(D.sum(dim=0), alpha=scales[self.bias])


@dataclass
class EmbeddingFactors:
    """A table that is read: row (i, j) has D[i, j, t] at entry tokens[i, t], summed over places t.

    Attributes:
        tokens: Which entries were read, int64 [b, T].
        D: Output gradients [b, k, T, F].
        weight: The table's name in the model.
    """

    tokens: Tensor
    D: Tensor
    weight: str

    def gram(self) -> Tensor:
        """Sum D D^T over pairs of places that read the same entry."""
        dtype = product_dtype(self.D.dtype)
        return _gram(
            self.D, lambda rows: (self.tokens[rows][:, :, None, None] == self.tokens[None, None]).to(dtype)
        )

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over places of D . (entry read)."""
        read = direction[self.weight].to(product_dtype(self.D.dtype))[self.tokens]
        return (_product(self.D) * read.unsqueeze(1)).sum(dim=(2, 3))

    def add_vjp_(self, out: Mapping[str, Tensor], D: Tensor, scales: Mapping[str, float]) -> None:
        """Add the gradients D, weighted by u, [b T, F], to the entries that were read, times the scales."""
        table = out[self.weight]
        table.index_add_(0, self.tokens.flatten(), D.to(table.dtype), alpha=scales[self.weight])


Factors = LinearFactors | EmbeddingFactors


def joined(parts: Sequence[Factors]) -> Factors:
    """Return factors of ranges of samples, in order, as those of the whole batch."""
    first = parts[0]
    if len(parts) == 1:
        return first
    D = torch.cat([part.D for part in parts])
    if isinstance(first, EmbeddingFactors):
        tokens = torch.cat([part.tokens for part in parts if isinstance(part, EmbeddingFactors)])
        return EmbeddingFactors(tokens, D, first.weight)
    A = torch.cat([part.A for part in parts if isinstance(part, LinearFactors)])
    return LinearFactors(A, D, first.weight, first.bias)


def is_cheaper(b: int, k: int, T: int, num_inputs: int, num_outputs: int) -> bool:
    """Return whether a linear layer takes fewer multiplications as factors than as a block."""
    as_factors = (b * T) ** 2 * num_inputs + (b * k * T) ** 2 * (num_outputs + 1)
    as_block = (b * k * T + (b * k) ** 2) * num_inputs * num_outputs
    return T == 1 or as_factors < as_block


def _gram(D: Tensor, similarity: Callable[[slice], Tensor]) -> Tensor:
    """Return sum over t, s of similarity[i, t, i', s] D[i, j, t] . D[i', j', s] as [b k, b k]."""
    D = _product(D)
    b, k, T, _ = D.shape
    step = max(1, MOST_PAIRS // (b * k * k * T * T))
    parts = []
    for start in range(0, b, step):
        rows = slice(start, min(start + step, b))
        pairs = torch.tensordot(D[rows], D, dims=([3], [3]))  # [i, j, t, i', j', s]
        same = similarity(rows)
        if same.ndim:
            same = same[:, None, :, :, None, :]
        pairs *= same
        parts.append(pairs.sum(dim=(2, 5)) if T > 1 else pairs[:, :, 0, :, :, 0])
    return torch.cat(parts).reshape(b * k, b * k)


def weighted(factors: Factors, u: Tensor) -> Tensor:
    """Return the sum over residuals of u D, [b T, F], for u [b, k]."""
    D = _product(factors.D)
    u = u.to(D.device, D.dtype)
    summed = D[:, 0] * u[:, 0, None, None] if D.shape[1] == 1 else torch.einsum("bk,bktf->btf", u, D)
    return summed.flatten(end_dim=1)


def _product(factor: Tensor) -> Tensor:
    return factor.to(product_dtype(factor.dtype))
