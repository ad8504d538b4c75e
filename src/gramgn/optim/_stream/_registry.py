"""Which module types have a rule."""

from __future__ import annotations

from torch import nn

from gramgn.optim._stream import _rules_conv, _rules_dense, _rules_norm
from gramgn.optim._stream._rule import Rule

_CONV = Rule(_rules_conv.blocks)
_GROUP, _LAYER = Rule(_rules_norm.group_norm), Rule(_rules_norm.layer_norm)
_INSTANCE, _BATCH = Rule(_rules_norm.instance_norm), Rule(_rules_norm.batch_norm)

# Exact types: a subclass may compute something else.
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(
        _rules_dense.linear,
        factors=_rules_dense.linear_factors,
        prefers_factors=_rules_dense.linear_prefers_factors,
    ),
    nn.Embedding: Rule(
        _rules_dense.embedding,
        applies=_rules_dense.embedding_applies,
        factors=_rules_dense.embedding_factors,
        prefers_factors=_rules_dense.embedding_prefers_factors,
    ),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    nn.GroupNorm: _GROUP,
    nn.LayerNorm: _LAYER,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _INSTANCE),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _BATCH),
}
