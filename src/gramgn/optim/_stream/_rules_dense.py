"""Rules for linear layers and embeddings, as blocks or, where that is cheaper, as outer products."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from gramgn.optim._stream._blocks import Block, Blocks, Layout
from gramgn.optim._stream._factors import EmbeddingFactors, LinearFactors, is_cheaper
from gramgn.optim._stream._rule import RuleMemory


def linear(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory) -> Blocks:
    """Per-sample gradients of y = x W^T + c for x [b, ..., in]: sums over the middle dimensions."""
    A, D = _places(x, grad)
    b, num_inputs, num_outputs = len(A), A.shape[2], D.shape[2]
    blocks: dict[str, Tensor | Block] = {}
    if "weight" in names:
        rows = memory.of("weight").rows(1, num_outputs * num_inputs, A)
        torch.bmm(D.transpose(1, 2), A, out=rows[0].view(b, num_outputs, num_inputs))
        blocks["weight"] = Block(rows, Layout((num_outputs, num_inputs), (0, 1)))
    if "bias" in names:
        blocks["bias"] = D.sum(dim=1)
    return blocks


def linear_factors(
    _: nn.Module, x: Tensor, grad: Tensor, weight: str | None, bias: str | None
) -> LinearFactors:
    """Return input and output gradient of a linear layer as they are."""
    A, D = _places(x, grad)
    return LinearFactors(A, D.unsqueeze(1), weight, bias)


def linear_prefers_factors(module: nn.Module, b: int, k: int, shape: tuple[int, ...]) -> bool:
    """Return whether factors take fewer multiplications for inputs of a shape."""
    layer = cast(nn.Linear, module)
    return is_cheaper(b, k, math.prod(shape[1:-1]), layer.in_features, layer.out_features)


def embedding(module: nn.Module, x: Tensor, grad: Tensor, _: frozenset[str], __: RuleMemory) -> Blocks:
    """Per-sample gradients of a table [entries, features] read at x [b, ...]; the padding entry has none."""
    table = cast(nn.Embedding, module)
    rows, D = _read(table, x, grad)
    block = D.new_zeros(len(x), table.num_embeddings, table.embedding_dim)
    block.scatter_add_(1, rows.unsqueeze(-1).expand_as(D), D)
    return {"weight": block}


def embedding_factors(
    module: nn.Module, x: Tensor, grad: Tensor, weight: str | None, _: str | None
) -> EmbeddingFactors:
    """Return the entries read and the output's gradient."""
    assert weight is not None
    rows, D = _read(cast(nn.Embedding, module), x, grad)
    return EmbeddingFactors(rows, D.unsqueeze(1), weight)


def embedding_prefers_factors(module: nn.Module, _: int, __: int, shape: tuple[int, ...]) -> bool:
    """Return whether the table has more entries than a pair of samples has pairs of places."""
    return math.prod(shape[1:]) ** 2 < cast(nn.Embedding, module).num_embeddings


def embedding_applies(module: nn.Module) -> bool:
    """Return whether the table is read as it is: not renormalised, not scaled by counts of the batch."""
    table = cast(nn.Embedding, module)
    return table.max_norm is None and not table.scale_grad_by_freq


def _places(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs [b, T, in] and gradients [b, T, out]."""
    b = len(x)
    return x.reshape(b, -1, x.shape[-1]).to(grad.dtype), grad.reshape(b, -1, grad.shape[-1])


def _read(table: nn.Embedding, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries read [b, T], int64, and the gradients [b, T, features]."""
    rows = x.reshape(len(x), -1).to(torch.int64)
    D = grad.reshape(len(x), -1, table.embedding_dim)
    if table.padding_idx is not None:
        D = D * (rows != table.padding_idx).unsqueeze(-1)
    return rows, D
