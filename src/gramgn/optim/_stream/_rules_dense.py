"""Rules for linear layers and embeddings."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from gramgn.optim._stream._buffers import Buffers


def linear(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: Buffers
) -> dict[str, Tensor]:
    """Per-sample gradients of y = x W^T + c for x [b, ..., in]: sums over the middle dimensions."""
    b = len(x)
    D, A = grad.reshape(b, -1, grad.shape[-1]), x.reshape(b, -1, x.shape[-1])
    blocks = {}
    if "weight" in names:
        blocks["weight"] = D.transpose(1, 2) @ A
    if "bias" in names:
        blocks["bias"] = D.sum(dim=1)
    return blocks


def embedding(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: Buffers
) -> dict[str, Tensor]:
    """Per-sample gradients of a table [entries, features] read at x [b, ...]; the padding entry has none."""
    table = cast(nn.Embedding, module)
    b, entries, features = len(x), table.num_embeddings, table.embedding_dim
    rows, D = x.reshape(b, -1), grad.reshape(b, -1, features)
    if table.padding_idx is not None:
        D = D * (rows != table.padding_idx).unsqueeze(-1)
    block = D.new_zeros(b, entries, features)
    block.scatter_add_(1, rows.to(dtype=torch.int64).unsqueeze(-1).expand_as(D), D)
    return {"weight": block}


def embedding_applies(module: nn.Module) -> bool:
    """Return whether the table is read as it is: not renormalised, not scaled by counts of the batch."""
    table = cast(nn.Embedding, module)
    return table.max_norm is None and not table.scale_grad_by_freq
