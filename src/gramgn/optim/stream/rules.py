"""Rules: how the per-sample gradients of a layer follow from its input and the gradient of its output.

To add a rule for a module type, write one small function here and register it in `RULES`. b samples, T places
(tokens, positions) per sample, C channels, F output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from gramgn.optim.closure import Forward
from gramgn.optim.stream.attention import Part, Projections
from gramgn.optim.stream.blocks import (
    Block,
    Blocks,
    EmbeddingFactors,
    Factors,
    Layout,
    LinearFactors,
    Memory,
    is_cheaper,
)
from gramgn.optim.stream.conv import (
    ConvPaths,
    by_dimension,
    geometry_of,
    padded_input,
    padding_of,
    patch_factors,
)
from gramgn.optim.stream.products import Products
from gramgn.optim.stream.recurrent import (
    Pull,
    check_sequences,
    is_known,
    pull_cells,
    pull_layers,
    run_layers,
)

if TYPE_CHECKING:
    from gramgn.optim.stream.capture import Call


@dataclass(frozen=True)
class RuleMemory:
    """Memory for the block of a module's weight, and the choice of kernels for convolutions."""

    weight: Memory
    conv_paths: ConvPaths


@dataclass(frozen=True)
class Rule:
    """How the per-sample gradients of one module type are computed.

    Attributes:
        blocks: Given the module, its input x [b, ...], the gradient of its output [b, ...], the names of the
            trained parameters and memory, returns a block or gradients [b, *shape] for each.
        params: The parameters' names in the module.
        applies: Whether the rule covers this instance.
        factors: Given the module, x, the gradient, and the names in the model of weight and bias (None if not
            trained), returns the block as outer products. None if the layer has no such form.
        prefers_factors: Given the module, b, k, the shape of x and the option `conv_path`, returns whether `factors` is
            cheaper.
        any_places: Whether x and the gradient may have any dimensions between samples and features.
        parts: For a module that consists of several layers, runs it and records these, for which the other attributes
            hold. None: a call of the module is one layer.
    """

    blocks: Callable[[nn.Module, Tensor, Tensor, frozenset[str], RuleMemory], Blocks]
    params: frozenset[str] = frozenset(("weight", "bias"))
    applies: Callable[[nn.Module], bool] = lambda module: True
    factors: Callable[[nn.Module, Tensor, Tensor, str | None, str | None], Factors] | None = None
    prefers_factors: Callable[[nn.Module, int, int, tuple[int, ...], str], bool] = lambda *_: False
    any_places: bool = False
    parts: type[Projections] | None = None


@dataclass(frozen=True)
class CallsRule:
    """How the parameters of one module type become linear layers, given all calls of a module in a forward pass.

    It serves modules with several results, and modules that are called once for every step.

    Attributes:
        pull: Given the module, its calls and the number of samples, returns a function of the gradients of what each
            call returned, which it may be given for several residuals.
        check: Given a call and the number of samples, rejects what the rule does not cover.
        applies: Whether the rule covers this instance.
        run: Given the module, its forward and the arguments of a call, calls it and returns also what `pull` is to find
            as `Call.kept`. None: nothing is kept.
    """

    pull: Callable[[nn.Module, Sequence[Call], int], Pull]
    check: Callable[[Call, int], None]
    applies: Callable[[nn.Module], bool] = lambda module: True
    run: Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] | None = None


def linear(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory) -> Blocks:
    """Return the blocks of y = x W^T + c for x [b, ..., in], summed over the middle dimensions."""
    A, D = _by_place(x, grad)
    blocks: dict[str, Tensor | Block] = {}
    if "weight" in names:
        blocks["weight"] = linear_block(A, D, memory.weight)
    if "bias" in names:
        blocks["bias"] = D.sum(dim=1)
    return blocks


def linear_block(A: Tensor, D: Tensor, memory: Memory) -> Block:
    """Return the block of a linear layer's weight for inputs [b, T, in] and output gradients [b, T, out]."""
    b, num_inputs, num_outputs = len(A), A.shape[2], D.shape[2]
    rows, products = memory.rows(1, num_outputs * num_inputs, A), memory.products
    if products.kernels is not None and products.is_fast(D.numel() * num_inputs, A, D):
        # As a pointwise convolution of T places.
        x, grad = (places.transpose(1, 2).unsqueeze(2) for places in (A, D))
        products.kernels.conv_weight(x, grad, rows[0], kernel_size=(1, 1))
        return Block(rows, Layout((num_inputs, num_outputs), (1, 0)))
    torch.bmm(D.transpose(1, 2), A, out=rows[0].view(b, num_outputs, num_inputs))
    return Block(rows, Layout((num_outputs, num_inputs), (0, 1)))


def linear_factors(
    _: nn.Module, x: Tensor, grad: Tensor, weight: str | None, bias: str | None
) -> LinearFactors:
    """Return the input and the output gradient of a linear layer."""
    A, D = _by_place(x, grad)
    return LinearFactors(A, D.unsqueeze(1), weight, bias)


def linear_prefers_factors(module: nn.Module, b: int, k: int, shape: tuple[int, ...], _: str) -> bool:
    """Return whether factors take fewer multiplications than blocks for inputs of this shape."""
    layer = cast(nn.Linear, module)
    return is_cheaper(b, k, math.prod(shape[1:-1]), layer.in_features, layer.out_features)


def projection(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory
) -> Blocks:
    """Return the blocks of a linear layer whose weight and bias may be some rows of larger parameters."""
    part = cast(Part, module)
    if part.is_whole:
        return linear(module, x, grad, names, memory)
    (A, D), blocks = _by_place(x, grad), {}
    if "weight" in names:
        blocks["weight"] = part.padded("weight", D.mT @ A)
    if "bias" in names:
        blocks["bias"] = part.padded("bias", D.sum(dim=1))
    return blocks


def embedding(module: nn.Module, x: Tensor, grad: Tensor, _: frozenset[str], __: RuleMemory) -> Blocks:
    """Return the block of a table [entries, features] read at x [b, ...]; the padding entry has no gradient."""
    table = cast(nn.Embedding, module)
    tokens, D = _by_token(table, x, grad)
    block = D.new_zeros(len(x), table.num_embeddings, table.embedding_dim)
    block.scatter_add_(1, tokens.unsqueeze(-1).expand_as(D), D)
    return {"weight": block}


def embedding_factors(
    module: nn.Module, x: Tensor, grad: Tensor, weight: str | None, _: str | None
) -> EmbeddingFactors:
    """Return the entries that were read and the output gradient."""
    assert weight is not None
    tokens, D = _by_token(cast(nn.Embedding, module), x, grad)
    return EmbeddingFactors(tokens, D.unsqueeze(1), weight)


def embedding_prefers_factors(module: nn.Module, _: int, __: int, shape: tuple[int, ...], ___: str) -> bool:
    """Return whether the table has more entries than two samples have pairs of places."""
    return math.prod(shape[1:]) ** 2 < cast(nn.Embedding, module).num_embeddings


def embedding_applies(module: nn.Module) -> bool:
    """Return whether gradients are derivatives: not divided by counts over the batch."""
    return not cast(nn.Embedding, module).scale_grad_by_freq


def convolution(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory
) -> Blocks:
    """Return the blocks of a convolution of x [b, C, *plane] with output gradient [b, F, *output plane]."""
    conv = cast(_ConvNd, module)
    _check_batched(x, conv.weight.ndim)
    blocks: dict[str, Tensor | Block] = {}
    if "bias" in names:
        blocks["bias"] = memory.weight.products.channel_sums(grad)
    if "weight" in names:
        x, padding = padded_input(conv, x.to(grad.dtype))
        blocks["weight"] = memory.conv_paths.form(geometry_of(conv), x, grad, padding, memory.weight)
    return blocks


def transposed_convolution(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory
) -> Blocks:
    """Return the blocks of the transpose of a convolution: of the convolution of `grad` with output gradient x."""
    conv = cast(_ConvTransposeNd, module)
    _check_batched(x, conv.weight.ndim)
    blocks: dict[str, Tensor | Block] = {}
    if "bias" in names:
        blocks["bias"] = memory.weight.products.channel_sums(grad)
    if "weight" in names:
        padding = by_dimension(conv.padding, conv.weight.ndim - 2)
        x = x.to(grad.dtype)
        blocks["weight"] = memory.conv_paths.form(geometry_of(conv), grad, x, padding, memory.weight)
    return blocks


def convolution_factors(
    module: nn.Module, x: Tensor, grad: Tensor, weight: str | None, bias: str | None
) -> LinearFactors:
    """Return the patches of a convolution's input and the output gradient."""
    _check_batched(x, 4)
    return patch_factors(cast(_ConvNd, module), x, grad, weight, bias)


def convolution_prefers_factors(
    module: nn.Module, b: int, k: int, shape: tuple[int, ...], conv_path: str
) -> bool:
    """Return whether factors of patches take fewer multiplications than blocks, as for few places and many channels."""
    conv = cast(_ConvNd, module)
    if conv_path != "static" or len(shape) != 4 or conv.groups > 1:
        return False
    geometry, amount = geometry_of(conv), padding_of(conv)
    padded = [n + sum(amount[i : i + 2]) for n, i in zip(shape[2:], (2, 0), strict=True)]
    sizes = zip(padded, geometry.kernel_size, geometry.stride, geometry.dilation, strict=True)
    num_places = math.prod((n - d * (kernel - 1) - 1) // s + 1 for n, kernel, s, d in sizes)
    return is_cheaper(b, k, num_places, conv.weight[0].numel(), len(conv.weight))


# Normalised inputs are recomputed, not kept.


def group_norm(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory
) -> Blocks:
    """Return the blocks [b, C] of group normalisation of x [b, C, ...]."""
    norm, x, products = cast(nn.GroupNorm, module), x.to(grad.dtype), memory.weight.products
    if (
        "weight" in names
        and (weight := products.group_norm_dots(grad, x, norm.num_groups, norm.eps)) is not None
    ):
        return {"weight": weight, **({"bias": products.channel_sums(grad)} if "bias" in names else {})}
    return _by_channel(functional.group_norm(x, norm.num_groups, eps=norm.eps), grad, names, products)


def instance_norm(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory
) -> Blocks:
    """Return the blocks [b, C] of instance normalisation of x [b, C, ...]."""
    norm, x = cast(_InstanceNorm, module), x.to(grad.dtype)
    _check_batched(x, next(ndim for kind, ndim in _INSTANCE_NORM_NDIM.items() if isinstance(module, kind)))
    own = norm.training or not norm.track_running_stats
    stats = (None, None) if own else (norm.running_mean, norm.running_var)
    return _by_channel(
        functional.instance_norm(x, *stats, use_input_stats=own, eps=norm.eps),
        grad,
        names,
        memory.weight.products,
    )


def batch_norm(
    module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], memory: RuleMemory
) -> Blocks:
    """Return the blocks [b, C] of batch normalisation with frozen statistics of x [b, C, ...]."""
    norm, x = cast(_BatchNorm, module), x.to(grad.dtype)
    return _by_channel(
        functional.batch_norm(x, norm.running_mean, norm.running_var, training=False, eps=norm.eps),
        grad,
        names,
        memory.weight.products,
    )


def layer_norm(module: nn.Module, x: Tensor, grad: Tensor, names: frozenset[str], _: RuleMemory) -> Blocks:
    """Return the blocks [b, *normalized_shape] of layer normalisation of x [b, ..., *normalized_shape]."""
    norm, x = cast(nn.LayerNorm, module), x.to(grad.dtype)
    shape = tuple(norm.normalized_shape)
    blocks = {}
    if "weight" in names:
        normal = functional.layer_norm(x, shape, eps=norm.eps)
        blocks["weight"] = (grad * normal).reshape(len(x), -1, *shape).sum(dim=1)
    if "bias" in names:
        blocks["bias"] = grad.reshape(len(x), -1, *shape).sum(dim=1)
    return blocks


_INSTANCE_NORM_NDIM: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}

ATTENTION_PARAMS = frozenset(
    f"{name}_{kind}" for name in ("in_proj", "q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")
) | {"out_proj.weight", "out_proj.bias", "bias_k", "bias_v"}

RULES: dict[type[nn.Module], Rule | CallsRule] = {
    nn.Linear: Rule(linear, factors=linear_factors, prefers_factors=linear_prefers_factors, any_places=True),
    nn.MultiheadAttention: Rule(
        projection,
        params=ATTENTION_PARAMS,
        factors=linear_factors,
        prefers_factors=linear_prefers_factors,
        any_places=True,
        parts=Projections,
    ),
    nn.Embedding: Rule(
        embedding,
        applies=embedding_applies,
        factors=embedding_factors,
        prefers_factors=embedding_prefers_factors,
        any_places=True,
    ),
    nn.Conv2d: Rule(convolution, factors=convolution_factors, prefers_factors=convolution_prefers_factors),
    **dict.fromkeys((nn.Conv1d, nn.Conv3d), Rule(convolution)),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Rule(transposed_convolution)
    ),
    nn.GroupNorm: Rule(group_norm),
    nn.LayerNorm: Rule(layer_norm, any_places=True),
    **dict.fromkeys(_INSTANCE_NORM_NDIM, Rule(instance_norm)),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), Rule(batch_norm)),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), CallsRule(pull_layers, check_sequences, is_known, run_layers)),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), CallsRule(pull_cells, check_sequences, is_known)),
}


HARMLESS = frozenset(("reset_parameters", "extra_repr"))
"""Methods of a layer that a subclass may override without computing something else; so may it special methods but
`CALLED`."""

CALLED = frozenset(("__call__", "__getattr__", "__getattribute__"))


def rule_of(kind: type[nn.Module]) -> Rule | CallsRule | None:
    """Return the rule for a type of modules, which may be that of a base class that computes the same."""
    base = next((base for base in kind.__mro__ if base in RULES), None)
    if base is None:
        return None
    for each in kind.__mro__:
        for name, value in vars(each).items() if each not in base.__mro__ else ():
            is_special = name.startswith("__") and name not in CALLED
            # A property may stand for a parameter.
            if hasattr(value, "__set__") or (hasattr(base, name) and not is_special and name not in HARMLESS):
                return None
    return RULES[base]


def _by_place(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs [b, T, in] and gradients [b, T, out]."""
    b = len(x)
    return x.reshape(b, -1, x.shape[-1]).to(grad.dtype), grad.reshape(b, -1, grad.shape[-1])


def _by_token(table: nn.Embedding, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries that were read, int64 [b, T], and the gradients [b, T, F]."""
    tokens = x.reshape(len(x), -1).to(torch.int64)
    D = grad.reshape(len(x), -1, table.embedding_dim)
    if table.padding_idx is not None:
        D = D * (tokens != table.padding_idx).unsqueeze(-1)
    return tokens, D


def _by_channel(normal: Tensor, grad: Tensor, names: frozenset[str], products: Products) -> Blocks:
    """Return the blocks of scale and shift by channel, summed over all dimensions but sample and channel."""
    blocks = {}
    if "weight" in names:
        blocks["weight"] = products.channel_dots(grad, normal)
    if "bias" in names:
        blocks["bias"] = products.channel_sums(grad)
    return blocks


def _check_batched(x: Tensor, ndim: int) -> None:
    """Reject an input without a dimension for samples, which some layers interpret as a single sample."""
    if x.ndim != ndim:
        raise ValueError(
            f"a layer was called with {list(x.shape)}, without a dimension for samples: pass [1, ...] for one "
            "sample, or use engine='loop'"
        )
