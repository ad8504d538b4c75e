"""What happens in one forward pass: which module owns which parameter, its calls, and the autograd graph.

The output of a call is never held, only its gradient edge: an in-place operation on the output afterwards leaves
the edge, and the hook on it, with the values before that operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from gramgn.optim.closure import OwnForward
from gramgn.optim.runtime import RandomState, drew_random_numbers, random_state
from gramgn.optim.stream.rules import RULES, Rule

READ_THEIR_CHILDREN = (nn.MultiheadAttention,)
"""Modules that read the parameters of their children without calling them."""

CONTAINERS = (
    parametrize.ParametrizationList,
    nn.ParameterList,
    nn.ParameterDict,
    nn.ModuleList,
    nn.ModuleDict,
)
"""Modules that are never called on a batch themselves."""


@dataclass(eq=False)
class Owner:
    """A module and the trained parameters for which its calls provide blocks."""

    path: str  # its name in the model; empty for the model itself
    module: nn.Module
    params: dict[str, str] = field(default_factory=dict)
    rule: Rule | None = None  # None: by `torch.func`, unless its parameters are only added and multiplied

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(self.module.parameters()).device

    def __str__(self) -> str:
        return f"'{self.path or 'the model'}' ({type(self.module).__name__})"


def find_owners(model: nn.Module, params: Mapping[str, Tensor], *, replaced: bool) -> list[Owner]:
    """Return the owners of all places in the model that hold a trained parameter, before anything runs.

    A parameter tied to several places has several owners. `replaced`: the user replaced the model's own forward.
    """
    names = {id(param): name for name, param in params.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[str, Owner] = {}
    for path, module in model.named_modules():
        for local, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in names:
                continue
            at = _calling(path, modules)
            owner = owners.setdefault(at, Owner(at, modules[at]))
            place = f"{path}.{local}".removeprefix(".")
            owner.params[place[len(at) :].removeprefix(".")] = names[id(param)]
    for owner in owners.values():
        rule = RULES.get(type(owner.module))
        # The forward must be the one that the rule knows, with the parameters under their own names.
        plain = not replaced if owner.module is model else "forward" not in vars(owner.module)
        if rule is not None and plain and set(owner.params) <= rule.params and rule.applies(owner.module):
            owner.rule = rule
    return list(owners.values())


def _calling(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost module at or around `path` whose call uses the parameters."""
    while path:
        parent = path.rpartition(".")[0]
        if path in modules and not _is_bypassed(modules[path], modules.get(parent)):
            return path
        path = parent
    return path


def _is_bypassed(module: nn.Module, parent: nn.Module | None) -> bool:
    return isinstance(module, CONTAINERS) or isinstance(
        parent, (*READ_THEIR_CHILDREN, parametrize.ParametrizationList)
    )


@dataclass(eq=False)
class Call:
    """One call of an owner."""

    owner: Owner
    module: nn.Module | None  # without its hooks, for the fall-back to call again; None if there is a rule
    args: tuple[Any, ...]  # detached, until `release`
    kwargs: dict[str, Any]  # detached
    inputs: list[Tensor]  # the tensors among the arguments
    versions: list[int]  # the number of in-place changes of each before the call
    first: int  # sequence number of the first autograd node created in the call
    last: int = 0  # sequence number after the last one
    edges: dict[int, GradientEdge] = field(
        default_factory=dict
    )  # of the floating point tensors returned, by index
    shapes: list[torch.Size] = field(default_factory=list)  # of these tensors
    active: frozenset[str] = frozenset()  # local names of the parameters for which the call provides blocks
    random: bool = False  # whether the call drew random numbers
    buffers: dict[str, Tensor] = field(default_factory=dict)  # copies from before the call, for the fall-back

    def contains(self, node: Any) -> bool:
        """Return whether an autograd node was created in this call."""
        return self.first <= node._sequence_nr() < self.last

    def check_unchanged(self) -> None:
        """Reject a call whose input was changed in place afterwards."""
        if [leaf._version for leaf in self.inputs] != self.versions:
            raise ValueError(
                f"the input of {self.owner} was changed in place after the call, so the Jacobian would be wrong: "
                "change a copy, or use engine='vmap'"
            )

    def input(self) -> Tensor:
        """Return the only tensor that a module with a rule is called with."""
        self.check_unchanged()
        (x,) = self.inputs
        return x

    def release(self) -> None:
        """Release the arguments."""
        self.args, self.kwargs, self.inputs, self.versions, self.buffers = (), {}, [], [], {}


Receive = Callable[[Call, int, Tensor], None]
"""Takes a call, the index of a tensor that it returned, and the gradient of this tensor."""


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
    """Record what a call returned and hook its gradients. Return what the caller is to receive."""
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
    """Record in `calls` those of all owners except the model itself, in the order in which they end.

    `receive` is called with the gradients of their outputs in a later backward pass.
    """
    handles = []
    try:
        for owner in owners:
            if owner.module is not model:
                recorder = _Recorder(owner, calls, receive)
                handles.append(owner.module.register_forward_pre_hook(recorder.before, with_kwargs=True))
                # Before all other hooks, so that it sees what the module itself returned.
                handles.append(
                    owner.module.register_forward_hook(recorder.after, prepend=True, with_kwargs=True)
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """The two hooks of one module, which may call itself."""

    def __init__(self, owner: Owner, calls: list[Call], receive: Receive) -> None:
        self.owner, self.calls, self.receive = owner, calls, receive
        self.open: list[tuple[Call, RandomState | None]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        again = None if self.owner.rule else OwnForward(module, module.forward)
        call = start_call(self.owner, again, args, kwargs)
        self.open.append((call, None if self.owner.rule else random_state(self.owner.device)))

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call, state = self.open.pop()
        output = end_call(call, output, self.receive)
        call.random = state is not None and drew_random_numbers(state, self.owner.device)
        self.calls.append(call)
        return output


def is_differentiable(leaf: Any) -> bool:
    """Return whether `leaf` is a tensor that can carry a gradient."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


Node = Any
"""A node of autograd's graph, for which torch has no complete type."""


@dataclass(frozen=True)
class Use:
    """A node that takes a parameter as its input number `place`."""

    node: Node
    place: int


@dataclass(frozen=True)
class Graph:
    """The nodes behind an output, inputs before the nodes that use them, and the uses of each parameter.

    As long as the graph is held, a node is always represented by the same Python object.
    """

    order: list[Node]
    uses: dict[str, list[Use]]

    def deepest(self, among: Set[Node]) -> set[Node]:
        """Return those of the given nodes that lead to no other of them."""
        leading: set[Node] = set()
        found = set()
        for node in self.order:
            if any(after in leading or after in among for after, _ in node.next_functions):
                leading.add(node)
            elif node in among:
                found.add(node)
        return found


def read_graph(output: Tensor, params: Mapping[str, Tensor]) -> Graph:
    """Traverse the graph of `output`; reject re-entrant checkpointing, which hides part of the network."""
    names = {id(param): name for name, param in params.items()}
    uses: dict[str, list[Use]] = {name: [] for name in params}
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(output.grad_fn, False)]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
            continue
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "re-entrant checkpointing hides layers from the optimizer: pass use_reentrant=False to "
                "torch.utils.checkpoint"
            )
        stack.append((node, True))
        for place, (after, _) in enumerate(node.next_functions):
            name = names.get(id(getattr(after, "variable", None)))
            if name is not None:
                uses[name].append(Use(node, place))
            stack.append((after, False))
    return Graph(order, uses)
