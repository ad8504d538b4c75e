"""The streaming engine: one forward pass, one backward pass with respect to layer outputs only.

Samples do not interact, so one backward pass of the summed residuals brings every sample's own gradient of
every layer's output, k passes for k residuals. As each arrives, the layer's rule turns it into that layer's
block of J, and the block's product is added to G. Autograd never forms the summed gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim._batch import Batch, OwnForward
from gramgn.optim._call import Forward, call_closure
from gramgn.optim._engine import Closure
from gramgn.optim._precision import jacobian_eps
from gramgn.optim._slopes import slopes_of_residual
from gramgn.optim._stream._accumulator import StreamLinearisation
from gramgn.optim._stream._backward import Backward
from gramgn.optim._stream._buffers import Buffers
from gramgn.optim._stream._capture import end_call, random_state, recorded_calls, start_call
from gramgn.optim._stream._owners import find_owners


class StreamEngine:
    """Forms J layer by layer. Memory for columns is kept between steps; copies of the engine start empty."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._checked: set[Any] = set()

    def linearise(
        self, model: nn.Module, params: Mapping[str, Tensor], closure: Closure
    ) -> StreamLinearisation:
        """Call ``closure`` once and differentiate its residuals; see ``Engine``.

        Raises:
            ValueError: The closure breaks its contract; or the network is used in a way in which the result
                would be wrong: samples that interact, a parameter read outside of its module in another way
                than by adding or multiplying, an input changed in place.
        """
        backward = Backward(params, self._buffers, self._checked)
        leaves: list[Tensor] = []

        def run(original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
            batch = Batch(args, kwargs)
            output = _recorded_forward(model, params, backward, original, args, kwargs)
            backward.start(output, batch.size)
            leaves.append(output.detach().requires_grad_())
            # A copy, so that a closure may change it in place.
            return leaves[0].clone(), batch.size

        try:
            residual, _, num_samples = call_closure(model, closure, run)
            slopes = slopes_of_residual(residual, leaves[0], model)
            with torch.no_grad():
                accumulated = backward.run(slopes)
        finally:
            backward.clear()
        return StreamLinearisation(
            residual=residual.detach(),
            num_samples=num_samples,
            eps=jacobian_eps(model, leaves[0].dtype, leaves[0].device),
            accumulated=accumulated,
        )


def _recorded_forward(
    model: nn.Module,
    params: Mapping[str, Tensor],
    backward: Backward,
    original: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Run the model's own forward; leave the calls of parameter owners in ``backward``."""
    replaced = getattr(original, "__func__", None) is not type(model).forward
    owners = find_owners(model, params, replaced=replaced)
    root = next((owner for owner in owners if owner.module is model), None)
    with recorded_calls(owners, model, backward.calls, backward.receive):
        if root is None:
            output = original(*args, **kwargs)
        else:
            call = start_call(root, OwnForward(model, original), args, kwargs)
            before = random_state(call)
            output = end_call(call, original(*args, **kwargs), backward.receive)
            call.random = not torch.equal(before, random_state(call))
            backward.calls.append(call)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
    return output
