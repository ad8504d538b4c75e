"""Parameters that are added to or multiplied with activations, wherever that happens.

Fixup's scalar biases and scales are of this kind: no layer owns them, and the autograd node that uses one says
all that is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramgn.optim._stream._buffers import Buffers
from gramgn.optim._stream._graph import Use

ADD, SUB, MUL = "AddBackward0", "SubBackward0", "MulBackward0"


def is_elementwise(use: Use, param: Tensor, num_samples: int) -> bool:
    """Return whether ``use`` adds or multiplies the parameter, broadcast over samples [b, ...]."""
    if use.node.name() not in (ADD, SUB, MUL):
        return False
    output = use.node._input_metadata[0]
    shape = tuple(output.shape)
    broadcast = param.ndim < len(shape) or (param.ndim == len(shape) and param.shape[0] == 1)
    return bool(shape) and shape[0] == num_samples and broadcast and output.dtype == param.dtype


def block(use: Use, param: Tensor, grad: Tensor, buffers: Buffers) -> Tensor:
    """Return the per-sample gradients [b, *param.shape], given that of the node's output [b, ...]."""
    if use.node.name() == MUL:
        other = use.node._saved_other if use.place == 0 else use.node._saved_self
        other = other.to(grad.dtype)
        is_summed = param.numel() * len(grad) < grad.numel()
        product = _product(grad, other, buffers) if is_summed else grad * other
        return _reduced(product, param.shape)
    factor = use.node._saved_alpha if use.place == 1 else 1
    if use.node.name() == SUB and use.place == 1:
        factor = -factor
    reduced = _reduced(grad, param.shape)
    return reduced if factor == 1 else factor * reduced


def _product(grad: Tensor, other: Tensor, buffers: Buffers) -> Tensor:
    """Return grad * other, where it can in memory that the next product takes again."""
    if other.shape != grad.shape or other.stride() != grad.stride():
        return grad * other
    dims = sorted(range(grad.ndim), key=grad.stride, reverse=True)
    product = buffers.get("product", tuple(grad.shape[d] for d in dims), grad)
    torch.mul(grad.permute(dims), other.permute(dims), out=product)
    return product.permute(sorted(range(grad.ndim), key=dims.__getitem__))


def _reduced(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum [b, ...] to [b, *shape] over the dimensions that ``shape`` was broadcast over."""
    if shape.numel() == 1:
        summed = grad.sum(dim=tuple(range(1, grad.ndim))) if grad.ndim > 1 else grad
        return summed.view(len(grad), *shape)
    tail = grad.shape[1:]
    own = shape[1:] if len(shape) == grad.ndim else shape
    aligned = (1,) * (len(tail) - len(own)) + tuple(own)
    dims = [i + 1 for i, (n, wide) in enumerate(zip(aligned, tail, strict=True)) if n == 1 and wide != 1]
    if dims:
        grad = grad.sum(dim=dims)
    return grad.reshape(len(grad), *shape)
