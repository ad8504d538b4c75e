"""Per-sample gradients at the nodes of autograd's graph in which something without samples meets samples.

Position tables, class tokens, weights that are merged from others, and networks that run on points which all samples
share have no dimension for samples. Where such a tensor enters an operation with samples, the operation's derivative
gives its gradient for each sample, rows [b, *shape], from the gradient of the operation's output and what autograd
saved. Everything before it, down to the parameters, is differentiated for all rows at once.

To add an operation: a function here, and its line in `FORMULAS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramgn.optim.kernels import serves
from gramgn.optim.stream.axes import PLAIN, Axis
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.capture import Node
from gramgn.optim.stream.products import Products

ADD, SUB, MUL = "AddBackward0", "SubBackward0", "MulBackward0"

BROADCASTING = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        *(
            (name, 0)
            for name in ("Add", "Sub", "Mul", "Div", "Where", "Maximum", "Minimum", "Atan2", "Hypot")
        ),
        *((name, 0) for name in ("Addcmul", "Addcdiv", "PreluKernel", "Lerp", "Logaddexp")),
        *((name, 1) for name in ("Lerp", "Pow")),
    )
)
"""Operations whose derivative, as the node itself returns it, has an entry for each entry of the output."""


ELEMENTWISE, FORMULA, BROADCAST, CALLS = "elementwise", "formula", "broadcast", "calls"
"""How the gradients of an input of a node are formed: as those of a broadcast summand or factor, by a formula, by
calling the node once, or by calling it for each sample."""


def way_of(node: Node, axes: Sequence[Axis | None], place: int, shape: torch.Size, dtype: torch.dtype) -> str:
    """Return how the gradients of an input of a shape are formed, given where the samples are in the outputs."""
    axis = axes[0]
    if axis is not None and is_elementwise(node, axis, shape, dtype):
        return ELEMENTWISE
    formula = formula_of(node, place)
    if axis is not None and formula is not None and formula.applies(node, axis, shape):
        return FORMULA
    if axis is not None and node.name() in BROADCASTING and has_no_samples(axis, _output(node), shape):
        return BROADCAST
    return CALLS


def is_packed(node: Node) -> bool:
    """Return whether what a node saved is made again when it is read, at most once in a pass, as by checkpointing."""
    raw = (getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_"))
    return any(getattr(each, "unpack_hook", None) is not None for each in raw)


def read_saved(node: Node) -> Any:
    """Return an object with all that a node saved."""
    return SimpleNamespace(**{name: getattr(node, name) for name in dir(node) if name.startswith("_saved_")})


def is_elementwise(node: Node, axis: Axis, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a node adds or multiplies something, broadcast over samples [b, ...]."""
    if node.name() not in (ADD, SUB, MUL) or axis != PLAIN:
        return False
    output = node._input_metadata[0]
    return output.dtype == dtype and not dtype.is_complex and has_no_samples(axis, output.shape, shape)


def has_no_samples(axis: Axis, output: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a shape that is broadcast to that of an output has one entry for all samples."""
    return shape[axis.dim - len(output)] == 1 if len(output) - axis.dim <= len(shape) else True


def elementwise_gradients(
    node: Node, saved: Any, place: int, shape: torch.Size, grad: Tensor, buffers: Buffers, products: Products
) -> Tensor:
    """Return gradients [b, *shape] of what a node adds or multiplies, given the gradient of its output [b, ...]."""
    if node.name() == MUL:
        other = saved._saved_other if place == 0 else saved._saved_self
        other = other.to(grad.dtype)
        kernels = products.kernels
        if kernels and shape.numel() == 1 and other.shape == grad.shape and serves(grad, other):
            return kernels.row_dots(grad, other).view(len(grad), *shape)
        is_summed = shape.numel() * len(grad) < grad.numel()
        product = _product(grad, other, buffers) if is_summed else grad * other
        return _reduced(product, shape, products)
    factor = node._saved_alpha if place == 1 else 1
    if node.name() == SUB and place == 1:
        factor = -factor
    reduced = _reduced(grad, shape, products)
    return reduced if factor == 1 else factor * reduced


def _product(grad: Tensor, other: Tensor, buffers: Buffers) -> Tensor:
    """Return grad * other, in reusable memory where the strides agree."""
    if other.shape != grad.shape or other.stride() != grad.stride():
        return grad * other
    dims = sorted(range(grad.ndim), key=grad.stride, reverse=True)
    product = buffers.get("product", tuple(grad.shape[d] for d in dims), grad)
    torch.mul(grad.permute(dims), other.permute(dims), out=product)
    return product.permute(sorted(range(grad.ndim), key=dims.__getitem__))


def _reduced(grad: Tensor, shape: torch.Size, products: Products) -> Tensor:
    """Return [b, ...] summed to [b, *shape] over the dimensions over which `shape` was broadcast."""
    if shape.numel() == 1:
        return products.sample_sums(grad).view(len(grad), *shape)
    return _summed(grad.unsqueeze(1), (1,) * (grad.ndim - len(shape)) + tuple(shape)).reshape(
        len(grad), *shape
    )


def broadcast_gradients(grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    """Return gradients [b, *shape] of what was broadcast to the shape of `grad` and has one entry for all samples."""
    aligned = (1,) * (grad.ndim - len(shape)) + tuple(shape)
    return _summed(axis.split(grad, b), aligned).reshape(b, *shape)


def _summed(rows: Tensor, aligned: Sequence[int]) -> Tensor:
    dims = [
        i + 1 for i, (n, wide) in enumerate(zip(aligned, rows.shape[1:], strict=True)) if n == 1 and wide != 1
    ]
    return rows.sum(dim=dims) if dims else rows


def gradients_by_call(
    node: Node, grads: Sequence[Tensor | None], axis: Axis, place: int, shape: torch.Size, b: int
) -> Tensor:
    """Return gradients [b, *shape] of an input of a broadcasting operation, which its node computes.

    Within a pass only if autograd asks for this input.
    """
    whole = _called(node, grads)[place]
    assert whole is not None
    return broadcast_gradients(whole, axis, shape, b)


def gradients_by_calls(
    node: Node,
    grads: Sequence[Tensor | None],
    axes: Sequence[Axis | None],
    place: int,
    shape: torch.Size,
    b: int,
) -> Tensor:
    """Return gradients [b, *shape] of an input of any node, which computes them sample by sample; see above."""
    rows = []
    for i in range(b):
        masked = [
            None if grad is None or axis is None else _of_sample(grad, axis, i, b)
            for grad, axis in zip(grads, axes, strict=True)
        ]
        of_sample = _called(node, masked)[place]
        if of_sample is None:  # a derivative that is zero everywhere
            like = next(grad for grad in grads if grad is not None)
            of_sample = like.new_zeros(shape)
        of_sample = of_sample.to_dense() if of_sample.is_sparse else of_sample
        rows.append(of_sample.sum_to_size(shape))
    return torch.stack(rows)


def _called(node: Node, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    # Nodes of user-defined functions are called by their method.
    returned = node(*grads) if callable(node) else node.apply(*grads)
    return returned if isinstance(returned, tuple) else (returned,)


def _of_sample(grad: Tensor, axis: Axis, i: int, b: int) -> Tensor:
    """Return a gradient that is zero but for one sample."""
    sizes = axis.sizes(grad.shape, b)
    assert sizes is not None
    sample = torch.arange(grad.shape[axis.dim], device=grad.device) // sizes[1] % b
    mask = (sample == i).view(-1, *(1,) * (grad.ndim - axis.dim - 1))
    return torch.where(mask, grad, grad.new_zeros(()))


class Formula(NamedTuple):
    """How the gradients of one input of a node follow.

    Attributes:
        gradients: Given what the node saved, the gradient of its output, where the samples are in it, the shape of the
            input, and b, returns [b, *shape].
        applies: Given the node, where the samples are in its output, and the shape of the input, whether it holds.
    """

    gradients: Callable[[Any, Tensor, Axis, torch.Size, int], Tensor]
    applies: Callable[[Node, Axis, Sequence[int]], bool]


def _output(node: Node) -> torch.Size:
    shape: torch.Size = node._input_metadata[0].shape
    return shape


def _in_rows(node: Node, axis: Axis, _: Sequence[int]) -> bool:
    return axis.dim == len(_output(node)) - 2


def _in_columns(node: Node, axis: Axis, _: Sequence[int]) -> bool:
    return axis.dim == len(_output(node)) - 1


def _in_no_feature(node: Node, axis: Axis, _: Sequence[int]) -> bool:
    return axis.dim < len(_output(node)) - 1


def _is_broadcast(node: Node, axis: Axis, shape: Sequence[int]) -> bool:
    return has_no_samples(axis, _output(node), shape)


def _factors(first: str, second: str, places: tuple[int, int], alpha: bool) -> dict[int, Formula]:
    """Return the formulas of a matrix product first second [..., M, N] whose rows or columns belong to samples."""

    def of_first(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
        other = getattr(saved, second).to(grad.dtype).conj()
        rows = axis.split(grad, b) @ axis.split(other, b).mT
        return rows * saved._saved_alpha if alpha and saved._saved_alpha != 1 else rows

    def of_second(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
        other = getattr(saved, first).to(grad.dtype).conj()
        rows = axis.split(other, b).mT @ axis.split(grad, b)
        return rows * saved._saved_alpha if alpha and saved._saved_alpha != 1 else rows

    return {
        places[0]: Formula(of_first, _in_columns),
        places[1]: Formula(of_second, _in_rows),
    }


def _summand(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    rows = broadcast_gradients(grad, axis, shape, b)
    return rows * saved._saved_beta if saved._saved_beta != 1 else rows


def _vector(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    matrix = axis.split(saved._saved_self.to(grad.dtype).conj(), b)
    return (matrix.mT @ axis.split(grad, b).unsqueeze(-1)).squeeze(-1)


def _expanded(_: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    return broadcast_gradients(grad, axis, shape, b)


def _repeated(_: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    rows = axis.split(grad, b)
    aligned = (1,) * (grad.ndim - len(shape)) + tuple(shape)
    sizes = [(wide // max(n, 1), n) for n, wide in zip(aligned, rows.shape[1:], strict=True)]
    copies = rows.reshape(b, *(size for pair in sizes for size in pair))
    return copies.sum(dim=list(range(1, copies.ndim, 2))).reshape(b, *shape)


def _term(sign: int) -> Formula:
    """Return the formula of a summand that is broadcast, and multiplied by `alpha` where it is the second one."""

    def gradients(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
        rows = broadcast_gradients(grad, axis, shape, b)
        factor = sign * saved._saved_alpha if sign else 1
        return rows if factor == 1 else rows * factor

    return Formula(gradients, _is_broadcast)


def _multiplier(other: str) -> Formula:
    """Return the formula of a factor that is broadcast."""

    def gradients(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
        return broadcast_gradients(grad * getattr(saved, other).conj().to(grad.dtype), axis, shape, b)

    return Formula(gradients, _is_broadcast)


def _kernel(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    """Return the gradients of the weight of a convolution."""
    weight = grad.new_empty(1).expand(shape)  # only its shape matters
    options = [
        list(getattr(saved, f"_saved_{name}")) for name in ("stride", "padding", "dilation", "output_padding")
    ]
    *first, output_padding = options

    def of_one(x: Tensor, D: Tensor) -> Tensor:
        of_weight: Tensor = torch.ops.aten.convolution_backward(
            D,
            x,
            weight,
            None,
            *first,
            saved._saved_transposed,
            output_padding,
            saved._saved_groups,
            (False, True, False),
        )[1]
        return of_weight

    x = axis.split(saved._saved_input.to(grad.dtype), b)
    return torch.func.vmap(of_one)(x, axis.split(grad, b))


def _channels(_: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    """Return the gradients of the summand of each channel."""
    return axis.split(grad, b).transpose(1, 2).flatten(2).sum(dim=2)


def _in_images(node: Node, axis: Axis, _: Sequence[int]) -> bool:
    return axis.dim == 0


def _layer_gain(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    normal = (saved._saved_input - saved._saved_result1) * saved._saved_result2
    return broadcast_gradients(grad * normal.to(grad.dtype), axis, shape, b)


def _group_gain(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    x, mean, scale = saved._saved_input, saved._saved_result1, saved._saved_result2
    normal = ((x.reshape(*mean.shape, -1) - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).view(x.shape)
    return _channels(saved, grad * normal.to(grad.dtype), axis, shape, b)


def _table(indices: Tensor, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    """Return the gradients of a table [entries, ...] read at `indices`."""
    tokens = axis.split(indices, b).reshape(b, -1)
    D = axis.split(grad, b).reshape(*tokens.shape, *shape[1:])
    rows = grad.new_zeros(b * shape[0], *shape[1:])
    tokens = tokens % shape[0] + shape[0] * torch.arange(b, device=tokens.device).unsqueeze(1)
    return rows.index_add_(0, tokens.flatten(), D.flatten(end_dim=1)).view(b, *shape)


def _embedding(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    indices = saved._saved_indices
    return _table(indices, _without_padding(saved, indices, grad), axis, shape, b)


def _without_padding(saved: Any, indices: Tensor, grad: Tensor) -> Tensor:
    """Return gradients [*indices, F] that are zero at the padding entry."""
    padding = saved._saved_padding_idx
    # torch shows -1, of tables without one, as an unsigned number.
    return grad if padding >= 2**63 or padding < 0 else grad * (indices != padding).unsqueeze(-1)


def _indexed(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    return _table(saved._saved_indices[0], grad, axis, shape, b)


def _by_one_index(node: Node, axis: Axis, _: Sequence[int]) -> bool:
    """Return whether a node reads entries of a table by one tensor of numbers."""
    first, *others = node._saved_indices
    return not others and first is not None and first.dtype == torch.int64 and axis.dim < first.ndim


def _selected(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    return _table(saved._saved_index, grad, axis, shape, b)


def _bag(saved: Any, grad: Tensor, axis: Axis, shape: torch.Size, b: int) -> Tensor:
    """Return the gradients of a table whose entries are summed, averaged or compared within bags."""
    sizes = axis.sizes(grad.shape, b)
    assert sizes is not None
    entries, padding = saved._saved_indices, saved._saved_padding_idx
    # The bag of each entry; torch saves it in some cases only.
    bags = (
        torch.bucketize(torch.arange(len(entries), device=grad.device), saved._saved_offsets, right=True) - 1
    )
    counts = torch.bincount(bags[entries != padding], minlength=len(grad))
    rows = grad.new_zeros(b, *shape)
    if saved._saved_mode == _MAXIMUM:
        samples = (torch.arange(len(grad), device=grad.device) // sizes[1] % b).unsqueeze(1)
        features, read = torch.arange(shape[1], device=grad.device), counts > 0
        where = (samples[read], saved._saved_result3[read], features)
        return rows.index_put_(where, grad[read], accumulate=True)
    D = grad[bags] * (entries != padding).unsqueeze(1)
    if saved._saved_mode == _MEAN:
        D = D / counts[bags].clamp(min=1).unsqueeze(1)
    if saved._saved_per_sample_weights is not None:
        D = D * saved._saved_per_sample_weights.to(D.dtype).unsqueeze(1)
    return rows.index_put_((bags // sizes[1] % b, entries), D, accumulate=True)


_MEAN, _MAXIMUM = 1, 2
"""How torch numbers the modes of bags."""

FORMULAS: Mapping[str, Mapping[int, Formula]] = {
    ADD: {0: _term(0), 1: _term(1)},
    SUB: {0: _term(0), 1: _term(-1)},
    MUL: {0: _multiplier("_saved_other"), 1: _multiplier("_saved_self")},
    "ExpandBackward0": {0: Formula(_expanded, _is_broadcast)},
    "RepeatBackward0": {0: Formula(_repeated, _is_broadcast)},
    "NativeLayerNormBackward0": {
        1: Formula(_layer_gain, _is_broadcast),
        2: Formula(_expanded, _is_broadcast),
    },
    "NativeGroupNormBackward0": {1: Formula(_group_gain, _in_images), 2: Formula(_channels, _in_images)},
    "ConvolutionBackward0": {1: Formula(_kernel, _in_images), 2: Formula(_channels, _in_images)},
    "MmBackward0": _factors("_saved_self", "_saved_mat2", (0, 1), alpha=False),
    "BmmBackward0": _factors("_saved_self", "_saved_mat2", (0, 1), alpha=False),
    "AddmmBackward0": {
        0: Formula(_summand, _is_broadcast),
        **_factors("_saved_mat1", "_saved_mat2", (1, 2), alpha=True),
    },
    "BaddbmmBackward0": {
        0: Formula(_summand, _is_broadcast),
        **_factors("_saved_batch1", "_saved_batch2", (1, 2), alpha=True),
    },
    "MvBackward0": {1: Formula(_vector, lambda *_: True)},
    "EmbeddingBackward0": {0: Formula(_embedding, _in_no_feature)},
    "EmbeddingBagBackward0": {0: Formula(_bag, lambda node, axis, _: axis.dim == 0)},
    "IndexBackward0": {0: Formula(_indexed, _by_one_index)},
    "IndexSelectBackward0": {
        0: Formula(_selected, lambda node, axis, _: axis.dim == node._saved_dim == 0),
    },
}


def formula_of(node: Node, place: int) -> Formula | None:
    """Return the formula for the gradients of an input, if there is one."""
    return FORMULAS.get(node.name(), {}).get(place)


ORDERED: Mapping[str, int] = {
    **dict.fromkeys(
        ("IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "MaskedSelectBackward0"),
        0,
    ),
    **dict.fromkeys(
        (
            "IndexPutBackward0",
            "IndexAddBackward0",
            "IndexCopyBackward0",
            "ScatterBackward0",
            "ScatterAddBackward0",
            "MaskedScatterBackward0",
        ),
        1,
    ),
}
"""Operations that may move samples by what they are given, with the number of the input that they move."""


def order_of(node: Node, axis: Axis) -> tuple[Tensor, ...]:
    """Return what says in which order a node moves the entries of the dimension of the samples.

    `axis` says where these are in the larger of the input that is moved and the output.
    """
    if hasattr(node, "_saved_mask"):
        return (node._saved_mask,)
    if hasattr(node, "_saved_dim"):
        return (node._saved_index,) if node._saved_dim == axis.dim else ()
    indices = node._saved_indices
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return tuple(index for index in indices if index is not None)
    of_samples = indices[axis.dim] if axis.dim < len(indices) else None
    return () if of_samples is None else (of_samples,)
