"""Rules for scale and shift after a normalisation. The normalised input is computed again, not kept."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gramgn.optim._stream._blocks import Blocks
from gramgn.optim._stream._rule import RuleMemory
from gramgn.optim._stream._shapes import check_batched

NDIM: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def group_norm(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: RuleMemory) -> Blocks:
    """Per-sample gradients [b, C] of group normalisation of x [b, C, ...]."""
    norm, x = cast(nn.GroupNorm, module), x.to(grad.dtype)
    return _by_channel(functional.group_norm(x, norm.num_groups, eps=norm.eps), grad, names)


def instance_norm(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: RuleMemory) -> Blocks:
    """Per-sample gradients [b, C] of instance normalisation of x [b, C, ...]."""
    norm, x = cast(_InstanceNorm, module), x.to(grad.dtype)
    check_batched(x, NDIM[type(module)])
    own = norm.training or not norm.track_running_stats
    stats = (None, None) if own else (norm.running_mean, norm.running_var)
    return _by_channel(functional.instance_norm(x, *stats, use_input_stats=own, eps=norm.eps), grad, names)


def batch_norm(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: RuleMemory) -> Blocks:
    """Per-sample gradients [b, C] of batch normalisation with frozen statistics of x [b, C, ...]."""
    norm, x = cast(_BatchNorm, module), x.to(grad.dtype)
    return _by_channel(
        functional.batch_norm(x, norm.running_mean, norm.running_var, training=False, eps=norm.eps),
        grad,
        names,
    )


def layer_norm(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: RuleMemory) -> Blocks:
    """Per-sample gradients [b, *normalized_shape] of layer normalisation of x [b, ..., *normalized_shape]."""
    norm, x = cast(nn.LayerNorm, module), x.to(grad.dtype)
    shape = tuple(norm.normalized_shape)
    blocks = {}
    if "weight" in names:
        normal = functional.layer_norm(x, shape, eps=norm.eps)
        blocks["weight"] = (grad * normal).reshape(len(x), -1, *shape).sum(dim=1)
    if "bias" in names:
        blocks["bias"] = grad.reshape(len(x), -1, *shape).sum(dim=1)
    return blocks


def _by_channel(normal: Tensor, grad: Tensor, names: frozenset[str]) -> Blocks:
    """Sum over all dimensions but sample and channel."""
    D = grad.flatten(2) if grad.ndim > 2 else grad.unsqueeze(2)
    blocks = {}
    if "weight" in names:
        blocks["weight"] = (D * normal.reshape(D.shape)).sum(dim=2)
    if "bias" in names:
        blocks["bias"] = D.sum(dim=2)
    return blocks
