"""Per-sample gradients of modules without a rule, which are called again, sample by sample, by `torch.func`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from gramgn.optim.closure import Batch, OwnForward
from gramgn.optim.runtime import attention_by_products, is_out_of_memory
from gramgn.optim.stream.capture import Call, is_differentiable
from gramgn.optim.stream.recurrent import states_of_one_sample
from gramgn.optim.trees import flatten

MOST_SHOWN = 4
"""The number of modules of a type that a note names."""

PREFIX = "model."
"""Prefix of the owner's parameter names in the module that is called again."""


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
            leaves = [leaf for leaf in flatten(output)[0] if is_differentiable(leaf)]
            return tuple(leaves[place] for place in places)

        values, pull = vjp(outputs, trained)  # type: ignore[misc]
        (pulled,) = pull(tuple(grad.reshape(value.shape) for grad, value in zip(grads, values, strict=True)))
        return pulled

    try:
        with (
            without_advice(),
            torch.enable_grad(),
            attention_by_products(),
            states_of_one_sample(call.owner.module),
        ):
            pulled = vmap(of_one)(tuple(batch.part(0, batch.size)), tuple(grads.values()))
    except RuntimeError as error:
        error.add_note(
            f"This error came from torch.func.vmap on {call.owner}, which has no rule; engine='loop' does not "
            "need torch.func."
        )
        raise
    return {name.removeprefix(PREFIX): gradients for name, gradients in pulled.items()}


def is_batched(call: Call) -> bool:
    """Return whether `torch.func.vmap` can run the module of a call."""
    active, call.active = call.active, frozenset(call.owner.params)
    results = {place: edge.node._input_metadata[edge.output_nr] for place, edge in call.edges.items()}
    device = next(call.owner.module.parameters()).device
    try:
        module_gradients(
            call,
            {
                place: torch.zeros(like.shape, dtype=like.dtype, device=device)
                for place, like in results.items()
            },
        )
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return False
    finally:
        call.active = active
    return True


@contextmanager
def without_advice() -> Iterator[None]:
    """Hide torch's advice to report operations that `torch.func.vmap` takes one by one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def note_missing_rules(calls: Iterable[Call], warned: set[type]) -> None:
    """Warn of the modules that were called again, once for each type."""
    paths: dict[type, dict[str, None]] = {}
    for call in calls:
        if type(call.owner.module) not in warned:
            paths.setdefault(type(call.owner.module), {})[call.owner.path or "the model itself"] = None
    if not paths:
        return
    warned.update(paths)
    kinds = ", ".join(f"{kind.__name__} (at {_listed(list(where))})" for kind, where in paths.items())
    warnings.warn(
        f"GramGaussNewton: no rule for {kinds}: this part of the Jacobian comes from torch.func on these modules, "
        "which is correct but slower",
        UserWarning,
        stacklevel=2,
    )


def _listed(paths: Sequence[str]) -> str:
    """Return a list of a few paths, and how many more there are."""
    shown = ", ".join(f"'{path}'" for path in paths[:MOST_SHOWN])
    return shown if len(paths) <= MOST_SHOWN else f"{shown} and {len(paths) - MOST_SHOWN} more"
