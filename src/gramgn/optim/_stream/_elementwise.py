"""Parameters that are added to or multiplied with activations, wherever that happens.

Fixup's scalar biases and scales are of this kind: no layer owns them, and the autograd node that uses one says
all that is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def block(use: Use, param: Tensor, grad: Tensor) -> Tensor:
    """Return the per-sample gradients [b, *param.shape], given that of the node's output [b, ...]."""
    if use.node.name() == MUL:
        other = use.node._saved_other if use.place == 0 else use.node._saved_self
        return _reduced_product(grad, other.to(grad.dtype), param.shape)
    factor = use.node._saved_alpha if use.place == 1 else 1
    if use.node.name() == SUB and use.place == 1:
        factor = -factor
    reduced = _reduced(grad, param.shape)
    return reduced if factor == 1 else factor * reduced


def _reduced_product(grad: Tensor, other: Tensor, shape: torch.Size) -> Tensor:
    if shape.numel() == 1 and other.shape == grad.shape:
        if grad.stride() == other.stride():
            # As they lie in memory, so that flattening copies nothing.
            order = sorted(range(1, grad.ndim), key=grad.stride, reverse=True)
            grad, other = grad.permute(0, *order), other.permute(0, *order)
        return torch.linalg.vecdot(grad.flatten(1), other.flatten(1)).view(len(grad), *shape)
    return _reduced(grad * other, shape)


def _reduced(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum [b, ...] to [b, *shape] over the dimensions that ``shape`` was broadcast over."""
    tail = grad.shape[1:]
    own = shape[1:] if len(shape) == grad.ndim else shape
    aligned = (1,) * (len(tail) - len(own)) + tuple(own)
    dims = [i + 1 for i, (n, wide) in enumerate(zip(aligned, tail, strict=True)) if n == 1 and wide != 1]
    if dims:
        grad = grad.sum(dim=dims)
    return grad.reshape(len(grad), *shape)
