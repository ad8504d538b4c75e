"""Norms and inner products over lists of tensors like the parameters, launched together and read back at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Euclidean norm of each tensor; not finite where an entry is not.

    Squares are summed in float32 or better. Where they overflow the entries are scaled first.
    """
    several = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=_sum_dtype(tensors))).tolist()
    return [
        norm if math.isfinite(norm) else _scaled_norm(tensor)
        for norm, tensor in zip(several, tensors, strict=True)
    ]


def inner_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """Return the inner product of each pair of tensors of one shape, summed in float32 or better."""
    dtype = _sum_dtype(left)
    pairs = zip(left, right, strict=True)
    products = [torch.dot(a.flatten().to(dtype), b.flatten().to(dtype)) for a, b in pairs]
    return torch.stack(products).tolist()


def by_group(values: Sequence[float], groups: Sequence[int], num_groups: int) -> list[list[float]]:
    """Return the values of each group."""
    sorted_out: list[list[float]] = [[] for _ in range(num_groups)]
    for value, group in zip(values, groups, strict=True):
        sorted_out[group].append(value)
    return sorted_out


def _scaled_norm(tensor: Tensor) -> float:
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(tensor / largest, dtype=_sum_dtype([tensor])))


def _sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
