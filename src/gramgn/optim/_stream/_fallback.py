"""Per-sample gradients of one module of any kind, by ``torch.func`` on that module alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from gramgn.optim._stream._capture import Call, is_differentiable
from gramgn.optim.closure import Batch

Blocks = dict[str, Tensor]


PREFIX = "model."
"""What stands before the owner's names in the module that is called again."""


def blocks(call: Call, grads: dict[int, Tensor]) -> Blocks:
    """Call the module again, sample by sample in ``torch.func.vmap``, and pull the gradients back.

    Args:
        call: The call; its parameters in ``active``.
        grads: The gradients of the tensors it returned, those that have one, by their place among them.
    """
    call.check_unchanged()
    module = call.module
    assert module is not None
    # By the place where each sits, so that a tied parameter is varied at the places asked for only.
    slots = {
        f"{path}.{name}".removeprefix("."): param.detach()
        for path, inner in module.named_modules()
        for name, param in inner.named_parameters(recurse=False, remove_duplicate=False)
    }
    trained = {PREFIX + name: slots.pop(PREFIX + name) for name in sorted(call.active)}
    batch = Batch(call.args, call.kwargs)
    places = list(grads)

    def of_one(sample: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Blocks:
        args, kwargs = batch.arguments(sample)

        def outputs(trained: Blocks) -> tuple[Tensor, ...]:
            output = functional_call(
                module, {**slots, **call.buffers, **trained}, args, kwargs, tie_weights=False
            )
            leaves = [leaf for leaf in pytree.tree_leaves(output) if is_differentiable(leaf)]
            return tuple(leaves[place] for place in places)

        values, pull = vjp(outputs, trained)  # type: ignore[misc]
        (pulled,) = pull(tuple(grad.reshape(value.shape) for grad, value in zip(grads, values, strict=True)))
        return pulled

    try:
        with torch.enable_grad():
            pulled: Blocks = vmap(of_one)(tuple(batch.part(0, batch.size)), tuple(grads.values()))
    except RuntimeError as error:
        error.add_note(
            f"This came from torch.func.vmap on '{call.owner.path}' ({type(call.owner.module).__name__}), "
            "which has no rule; engine='loop' does without it."
        )
        raise
    return {name.removeprefix(PREFIX): block for name, block in pulled.items()}
