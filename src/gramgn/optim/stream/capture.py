"""What happens in one forward pass: which module owns which parameter, its calls, and the autograd graph.

The output of a call is never held, only its gradient edge: an in-place operation on the output afterwards leaves
the edge, and the hook on it, with the values before that operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize

from gramgn.optim.closure import Forward
from gramgn.optim.runtime import RandomState, random_state
from gramgn.optim.stream.attention import Part
from gramgn.optim.stream.axes import PLAIN, Axis
from gramgn.optim.stream.rules import CallsRule, Rule, rule_of
from gramgn.optim.trees import flatten, map_tensors, tensors_in

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
    rule: Rule | CallsRule | None = (
        None  # None: by `torch.func`, unless its parameters are only added and multiplied
    )
    buffers: list[tuple[str, nn.Module, str]] = field(
        default_factory=list
    )  # without a rule: the name of each buffer below the module, and where it is
    parts: dict[str, Owner] = field(default_factory=dict)  # of a module that consists of several layers

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
        rule = rule_of(type(owner.module))
        # The forward must be the one that the rule knows, with the parameters under their own names.
        plain = not replaced if owner.module is model else "forward" not in vars(owner.module)
        known = isinstance(rule, CallsRule) or (rule is not None and set(owner.params) <= rule.params)
        if rule is not None and plain and known and rule.applies(owner.module):
            owner.rule = rule
            continue
        owner.buffers = [
            (f"{path}.{local}".removeprefix("."), module, local)
            for path, module in owner.module.named_modules()
            for local, buffer in module._buffers.items()
            if buffer is not None
        ]
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
    forward: Forward  # what was called, for the fall-back to call again
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
    kept: Any = None  # what the rule keeps of the call, besides its arguments
    active: frozenset[str] = frozenset()  # local names of the parameters for which the call provides blocks
    axis: Axis = PLAIN  # where the samples are in what was returned
    # Without a rule: the states of the random number generators before and after the call, and copies of the
    # buffers from before it.
    random: tuple[RandomState, RandomState] = ({}, {})
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def drew_random_numbers(self) -> bool:
        """Whether a call without a rule drew random numbers."""
        before, after = self.random
        return any(not torch.equal(after[name], state) for name, state in before.items())

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
        self.kept = None


Receive = Callable[[Call, int, Tensor], None]
"""Takes a call, the index of a tensor that it returned, and the gradient of this tensor."""


def start_call(owner: Owner, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the record of a call that is about to happen."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        args = (args[0].detach(),)
        inputs: list[Tensor] = [args[0]]
    else:
        args, kwargs = map_tensors((args, kwargs), Tensor.detach)
        inputs = list(tensors_in((args, kwargs)))
    versions = [leaf._version for leaf in inputs]
    return Call(owner, forward, args, kwargs, inputs, versions, _next_number())


def end_call(call: Call, output: Any, receive: Receive) -> Any:
    """Record what a call returned and hook its gradients. Return what the caller is to receive."""
    if isinstance(output, Tensor):
        output = _hooked(call, output, receive)
    else:
        leaves, build = flatten(output)
        # Of copies, since a result may be made from another, whose gradient would then count its part twice.
        copies = [leaf.clone() if is_differentiable(leaf) else leaf for leaf in leaves]
        output = build([_hooked(call, leaf, receive) for leaf in copies])
    call.last = _next_number()
    return output


def _next_number() -> int:
    """Return the sequence number of the next autograd node."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


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


class Inside:
    """Records the layers of which one call of a module consists; see `Rule.parts`."""

    def __init__(self, owner: Owner, receive: Receive) -> None:
        self._owner, self._receive = owner, receive
        self._first = _next_number()
        self._calls: list[Call] = []

    def record(self, part: Part, x: Tensor, y: Tensor) -> None:
        """Record that a part turned x into y."""
        owner = self._part(part)
        if not owner.params or not y.requires_grad:
            return
        call = start_call(owner, part, (x,), {})
        call.first, call.shapes = self._first, [y.shape]
        y.register_hook(lambda grad: self._receive(call, 0, grad))
        call.edges[0] = get_gradient_edge(y)
        self._calls.append(call)

    def ended(self) -> list[Call]:
        """Return the calls of the parts, each of which may take what happened anywhere in the call of the module."""
        last = _next_number()
        for call in self._calls:
            call.last = last
        return self._calls

    def _part(self, part: Part) -> Owner:
        """Return the part as an owner, which stays the same while the module does."""
        outer, key = self._owner, str(part.places)
        if key not in outer.parts:
            trained = {local: outer.params.get(name) for local, (name, _, _) in part.places.items()}
            params = {local: name for local, name in trained.items() if name is not None}
            outer.parts[key] = Owner(f"{outer.path}:{key}", part, params, outer.rule)
        return outer.parts[key]


def recorded(
    owner: Owner, forward: Forward, device: torch.device, calls: list[Call], receive: Receive
) -> Forward:
    """Return `forward` of an owner, recording its calls in `calls` in the order in which they end.

    `receive` is called with the gradients of their outputs in a later backward pass.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(owner.rule, Rule) and owner.rule.parts is not None:
            inside = Inside(owner, receive)
            output = owner.rule.parts(owner.module, inside.record).run(*args, **kwargs)
            calls.extend(inside.ended())
            return output
        call = start_call(owner, forward, args, kwargs)
        if isinstance(owner.rule, CallsRule) and owner.rule.run is not None:
            output, call.kept = owner.rule.run(owner.module, forward, args, kwargs)
            output = end_call(call, output, receive)
        elif owner.rule is not None:
            output = end_call(call, forward(*args, **kwargs), receive)
        else:
            buffers = {name: module._buffers[local] for name, module, local in owner.buffers}
            call.buffers = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}
            before = random_state(device)
            output = end_call(call, forward(*args, **kwargs), receive)
            call.random = (before, random_state(device))
        calls.append(call)
        return output

    return run


@contextmanager
def recorded_calls(
    owners: Iterable[Owner], device: torch.device, calls: list[Call], receive: Receive
) -> Iterator[None]:
    """Record the calls of all owners; see `recorded`.

    Their forwards are replaced, and not hooked: so what is recorded lies inside all hooks of a module.
    """
    own = [(vars(owner.module), vars(owner.module).get("forward")) for owner in owners]
    try:
        for owner in owners:
            vars(owner.module)["forward"] = recorded(owner, owner.module.forward, device, calls, receive)
        yield
    finally:
        for attributes, forward in own:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


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
    """The nodes behind an output and the uses of the trained parameters.

    As long as the graph is held, a node is always represented by the same Python object.
    """

    nodes: dict[Node, int]  # every node that is reached, with its number
    uses: list[tuple[str, Use]]  # with the name of the parameter
    shape: list[Any]  # equal for two graphs of the same nodes, edges and parameters

    def deepest(self, among: Set[Node]) -> set[Node]:
        """Return those of the given nodes that lead to no other of them."""
        users: dict[Node, list[Node]] = {}
        for node in self.nodes:
            for after, _ in node.next_functions:
                users.setdefault(after, []).append(node)
        leading: set[Node] = set()
        waiting = list(among)
        while waiting:
            for node in users.get(waiting.pop(), ()):
                if node not in leading:
                    leading.add(node)
                    waiting.append(node)
        return {node for node in among if node in self.nodes} - leading


_LEAF: Any = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


def read_graph(output: Tensor, names: Mapping[int, str]) -> Graph:
    """Traverse the graph of `output`.

    Args:
        output: The output.
        names: The names of the trained parameters, by their identity.
    """
    nodes: dict[Node, int] = {}
    uses: list[tuple[str, Use]] = []
    shape: list[Any] = []
    waiting: list[Node] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        number = nodes.get(node)
        if number is not None:
            shape.append(number)
            continue
        nodes[node] = len(nodes)
        following = node.next_functions
        shape += (node.__class__, len(following))
        for place, (after, _) in enumerate(following):
            name = None
            if after.__class__ is _LEAF:
                name = names.get(id(after.variable))
                if name is not None:
                    uses.append((name, Use(node, place)))
            shape.append(after is None or name)
            if after is not None:
                waiting.append(after)
    return Graph(nodes, uses, shape)
