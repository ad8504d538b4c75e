"""Recording the calls of the modules that own parameters, for the length of one forward pass.

A call's output is never held. Its gradient edge is: an in-place operation afterwards leaves the edge, and the
hook on it, with the values before that operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from gramgn.optim._stream._owners import Owner
from gramgn.optim.closure import OwnForward
from gramgn.optim.runtime import is_capturing

Receive = Callable[["Call", int, Tensor], None]


@dataclass(eq=False)
class Call:
    """One call of an owner.

    Attributes:
        owner: What was called.
        module: What to call again for the fall-back, past the hooks, which ran already; None for a rule.
        buffers: The module's buffers before the call, for the fall-back.
        args: Its arguments, detached. ``release`` lets them go.
        kwargs: Its keyword arguments, detached.
        inputs: The tensors among them.
        versions: How often each of these had been changed in place.
        first: The number of the first autograd node made in the call.
        last: The number after the last.
        edges: The gradient edges of the floating point tensors it returned, by their place among those.
        shapes: The shapes of the latter.
        active: The names in the module of the parameters that it is to give blocks for.
        random: Whether random numbers were drawn.
    """

    owner: Owner
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    versions: list[int]
    first: int
    last: int = 0
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    shapes: list[torch.Size] = field(default_factory=list)
    active: frozenset[str] = frozenset()
    random: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def contains(self, node: Any) -> bool:
        """Return whether an autograd node was made in this call."""
        return self.first <= node._sequence_nr() < self.last

    def check_unchanged(self) -> None:
        """Refuse a call whose input was changed in place after it."""
        if [leaf._version for leaf in self.inputs] != self.versions:
            raise ValueError(
                f"the input of '{self.owner.path}' ({type(self.owner.module).__name__}) was changed in place "
                "after the call, so the Jacobian would be wrong: change a copy, or take engine='vmap'"
            )

    def input(self) -> Tensor:
        """Return the one tensor that a module with a rule is called with."""
        self.check_unchanged()
        (x,) = self.inputs
        return x

    def release(self) -> None:
        """Let the arguments go."""
        self.args, self.kwargs, self.inputs, self.versions, self.buffers = (), {}, [], [], {}


def start_call(owner: Owner, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the record of a call that is about to happen."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        args = (args[0].detach(),)
        inputs: list[Tensor] = [args[0]]
    else:
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = [leaf._version for leaf in inputs]
    first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    call = Call(owner, module, args, kwargs, inputs, versions, first)
    if module is not None:
        call.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return call


def end_call(call: Call, output: Any, receive: Receive) -> Any:
    """Note what a call returned and hook its gradients; return what is to be handed on."""
    if isinstance(output, Tensor):
        output = _hooked(call, output, receive)
    else:
        leaves, structure = pytree.tree_flatten(output)
        output = pytree.tree_unflatten([_hooked(call, leaf, receive) for leaf in leaves], structure)
    call.last = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return output


def _hooked(call: Call, leaf: Any, receive: Receive) -> Any:
    if not is_differentiable(leaf):
        return leaf
    place = len(call.shapes)
    call.shapes.append(leaf.shape)
    if leaf.requires_grad:
        if leaf._is_view():
            # An in-place operation on a view makes autograd forget the view's own edge.
            leaf = leaf.clone()
        leaf.register_hook(lambda grad: receive(call, place, grad))
        call.edges[place] = get_gradient_edge(leaf)
    return leaf


@contextmanager
def recorded_calls(
    owners: Sequence[Owner], model: nn.Module, calls: list[Call], receive: Receive
) -> Iterator[None]:
    """Record the calls of all owners but the model itself, in the order in which they end.

    Args:
        owners: Whose calls to record.
        model: The network.
        calls: Where to put the records.
        receive: Told of the gradients of their outputs, in a backward pass later.
    """
    handles = []
    try:
        for owner in owners:
            if owner.module is not model:
                recorder = _Recorder(owner, calls, receive)
                handles.append(owner.module.register_forward_pre_hook(recorder.before, with_kwargs=True))
                # First of all, so that it sees what the module itself returned.
                handles.append(
                    owner.module.register_forward_hook(recorder.after, prepend=True, with_kwargs=True)
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """The two hooks of one module; it may call itself."""

    def __init__(self, owner: Owner, calls: list[Call], receive: Receive) -> None:
        self.owner, self.calls, self.receive = owner, calls, receive
        self.open: list[tuple[Call, Tensor | None]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        again = None if self.owner.rule else OwnForward(module, module.forward)
        call = start_call(self.owner, again, args, kwargs)
        self.open.append((call, None if self.owner.rule else random_state(call)))

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call, state = self.open.pop()
        output = end_call(call, output, self.receive)
        call.random = state is not None and not torch.equal(state, random_state(call))
        self.calls.append(call)
        return output


def random_state(call: Call) -> Tensor:
    """Return the state of the random numbers on the device of the call; unknown in a CUDA graph."""
    if is_capturing():
        return torch.empty(0)
    device = next(call.owner.module.parameters()).device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def is_differentiable(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor that can carry a gradient."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
