"""Which module types have a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from gramgn.optim._stream import _rules_conv, _rules_dense, _rules_norm
from gramgn.optim._stream._buffers import Buffers

Blocks = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """How the per-sample gradients of one module type are computed.

    Attributes:
        blocks: Given the module, its input x [b, ...], the gradient of its output [b, ...], the names of the
            trained parameters and memory to use, returns a block [b, ...] for each, in the order of entries
            that ``unpack`` undoes.
        params: The parameters' names in the module.
        applies: Whether the rule covers this instance.
        factored: Whether a block is an outer product of x and the gradient, so that it need not be formed
            where x is [b, features].
    """

    blocks: Callable[[nn.Module, Tensor, Tensor, frozenset[str], Buffers], Blocks]
    params: frozenset[str] = frozenset(("weight", "bias"))
    applies: Callable[[nn.Module], bool] = lambda module: True
    factored: bool = False


_CONV = Rule(_rules_conv.blocks)
_GROUP, _LAYER = Rule(_rules_norm.group_norm), Rule(_rules_norm.layer_norm)
_INSTANCE, _BATCH = Rule(_rules_norm.instance_norm), Rule(_rules_norm.batch_norm)

# Exact types: a subclass may compute something else.
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(_rules_dense.linear, factored=True),
    nn.Embedding: Rule(_rules_dense.embedding, applies=_rules_dense.embedding_applies),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    nn.GroupNorm: _GROUP,
    nn.LayerNorm: _LAYER,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _INSTANCE),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _BATCH),
}
