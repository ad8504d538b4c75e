"""Per-sample gradients of parameters without a rule.

Parameters that are only added to or multiplied with activations, such as Fixup's scalar biases and scales, need
no rule: the autograd node that uses one determines its gradients. Modules of any other kind are called again,
sample by sample, by `torch.func`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from gramgn.optim.closure import Batch, OwnForward
from gramgn.optim.kernels import serves
from gramgn.optim.runtime import attention_by_products
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.capture import Call, Node, Owner, Use, is_differentiable
from gramgn.optim.stream.products import Products
from gramgn.optim.stream.recurrent import states_of_one_sample

ADD, SUB, MUL = "AddBackward0", "SubBackward0", "MulBackward0"
PREFIX = "model."
"""Prefix of the owner's parameter names in the module that is called again."""


def is_elementwise(use: Use, param: Tensor, num_samples: int) -> bool:
    """Return whether `use` adds or multiplies the parameter, broadcast over samples [b, ...]."""
    if use.node.name() not in (ADD, SUB, MUL):
        return False
    output = use.node._input_metadata[0]
    shape = tuple(output.shape)
    if not shape or shape[0] != num_samples or output.dtype != param.dtype:
        return False
    return param.ndim < len(shape) or param.shape[0] == 1


def is_of_parameters_alone(node: Node) -> bool:
    """Return whether a node computes with nothing but parameters, as one that scales a weight: it has no samples."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for after, _ in node.next_functions:
            if after is None:
                return False
            waiting.append(after)
    return True


def elementwise_gradients(
    use: Use, param: Tensor, grad: Tensor, buffers: Buffers, products: Products
) -> Tensor:
    """Return gradients [b, *param.shape] of an elementwise use, given the gradient of its output [b, ...]."""
    if use.node.name() == MUL:
        other = use.node._saved_other if use.place == 0 else use.node._saved_self
        other = other.to(grad.dtype)
        kernels = products.kernels
        if kernels and param.numel() == 1 and other.shape == grad.shape and serves(grad, other):
            return kernels.row_dots(grad, other).view(len(grad), *param.shape)
        is_summed = param.numel() * len(grad) < grad.numel()
        product = _product(grad, other, buffers) if is_summed else grad * other
        return _reduced(product, param.shape, products)
    factor = use.node._saved_alpha if use.place == 1 else 1
    if use.node.name() == SUB and use.place == 1:
        factor = -factor
    reduced = _reduced(grad, param.shape, products)
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
    tail = grad.shape[1:]
    own = shape[1:] if len(shape) == grad.ndim else shape
    aligned = (1,) * (len(tail) - len(own)) + tuple(own)
    dims = [i + 1 for i, (n, wide) in enumerate(zip(aligned, tail, strict=True)) if n == 1 and wide != 1]
    if dims:
        grad = grad.sum(dim=dims)
    return grad.reshape(len(grad), *shape)


def module_gradients(call: Call, grads: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return gradients [b, *shape] by local name, by calling the module again under `torch.func.vmap`.

    `grads` are the gradients of the tensors that the call returned, as far as they have one, by index.
    """
    call.check_unchanged()
    module = OwnForward(call.owner.module, call.forward)
    # By the place that holds the parameter, so that a tied one is varied at the requested places only.
    slots = {
        f"{path}.{name}".removeprefix("."): param.detach()
        for path, inner in module.named_modules()
        for name, param in inner.named_parameters(recurse=False, remove_duplicate=False)
    }
    trained = {PREFIX + name: slots.pop(PREFIX + name) for name in sorted(call.active)}
    buffers = {PREFIX + name: buffer for name, buffer in call.buffers.items()}
    batch = Batch(call.args, call.kwargs)
    places = list(grads)

    def of_one(sample: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        args, kwargs = batch.arguments(sample)

        def outputs(trained: dict[str, Tensor]) -> tuple[Tensor, ...]:
            output = functional_call(module, {**slots, **buffers, **trained}, args, kwargs, tie_weights=False)
            leaves = [leaf for leaf in pytree.tree_leaves(output) if is_differentiable(leaf)]
            return tuple(leaves[place] for place in places)

        values, pull = vjp(outputs, trained)  # type: ignore[misc]
        for grad, value in zip(grads, values, strict=True):
            if grad.numel() != value.numel():
                raise ValueError(
                    f"{call.owner} returns {list(value.shape)} for one sample alone, but {list(grad.shape)} for each "
                    f"sample of a batch of {batch.size}: it combines the samples with a parameter or another tensor "
                    "that has as many entries as this batch. Give each sample its own entry by an index, or use "
                    "engine='loop'"
                )
        (pulled,) = pull(tuple(grad.reshape(value.shape) for grad, value in zip(grads, values, strict=True)))
        return pulled

    try:
        with torch.enable_grad(), attention_by_products(), states_of_one_sample(call.owner.module):
            pulled = vmap(of_one)(tuple(batch.part(0, batch.size)), tuple(grads.values()))
    except RuntimeError as error:
        error.add_note(
            f"This error came from torch.func.vmap on {call.owner}, which has no rule; engine='loop' does not "
            "need torch.func."
        )
        raise
    return {name.removeprefix(PREFIX): gradients for name, gradients in pulled.items()}


def warn_once(owner: Owner, warned: set[type]) -> None:
    """Warn that the owner's type has no rule, unless it is among the types `warned` of so far."""
    kind = type(owner.module)
    if kind in warned:
        return
    warned.add(kind)
    warnings.warn(
        f"GramGaussNewton: no rule for {kind.__name__} (at '{owner.path or 'the model itself'}'): its part of "
        "the Jacobian comes from torch.func on that module, which is correct but slower",
        UserWarning,
        stacklevel=2,
    )
