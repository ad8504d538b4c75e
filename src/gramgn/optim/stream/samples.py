"""Which entries of an intermediate result belong to which sample, as its gradients show.

Samples do not interact, so the gradient of an entry is linear in the gradients of the outputs of one sample, its own.
Two backward passes, with gradients of the outputs and with the same ones times a code for each sample, therefore
differ in each entry by the code of its sample: this shows where the samples are, in which dimension and in which order
next to others (time folded into the batch). Entries that depend on several samples, as those of parameters and of all
that is computed from them alone, differ by no code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramgn.optim.runtime import is_capturing, probe_weights
from gramgn.optim.stream.axes import MAJOR, PLAIN, Axis
from gramgn.optim.stream.capture import Call, Graph, Node, Use
from gramgn.optim.stream.nodes import ORDERED, order_of, way_of
from gramgn.optim.stream.rules import CallsRule
from gramgn.optim.verify import without_zeros

MOST_ENTRIES = 2**12
"""Entries of one gradient that are compared; of a larger one, that many at random."""

EXPONENTS = 3
"""Codes are powers of two from 2^-3 to 2^3 with both signs, which scale a gradient without rounding."""

CLOSE = 1e-3
"""Relative difference up to which two gradients are the same."""


class Entry(NamedTuple):
    """An input without samples of a node that has some."""

    place: int  # the number of the input
    name: str | None  # of the parameter that it is; None: it is a table, computed from parameters
    table: tuple[int, int]  # the numbers of the node that computed it and of the output
    way: str  # see `way_of`


Axes = dict[tuple[int, int], Axis | None]
"""By number of a node and of its output: where the samples are; None: nowhere. Outputs that show nothing are absent."""


class Results:
    """Where the samples are in the results of a graph with its output [b, ...].

    Attributes:
        shared: Whether a call returned something without samples.
        certain: Whether the gradients that were looked at show the places of the samples; zeros may hide them.
    """

    def __init__(
        self,
        graph: Graph,
        output: Tensor,
        params: Mapping[str, Tensor],
        b: int,
        rest: Mapping[str, Tensor],
    ) -> None:
        self.shared, self.certain = False, True
        self._graph, self._params, self._b = graph, params, b
        guess = b == 1 or is_capturing()
        self._axes, self._hidden = (
            (_guessed_axes(graph, b), set()) if guess else find_axes(graph, output, params, b, rest)
        )
        self._users: dict[Node, list[tuple[Node, int, int]]] = {}
        for node in graph.nodes:
            for place, (after, of_after) in enumerate(node.next_functions):
                if after is not None:
                    self._users.setdefault(after, []).append((node, place, of_after))

    def of_node(self, node: Node) -> tuple[Axis | None, ...]:
        """Return where the samples are in each output of a node; nowhere in one without a gradient."""
        number = self._graph.nodes[node]
        return tuple(self._at([(number, place)])[0] for place in range(len(node._input_metadata)))

    def _at(self, keys: Iterable[tuple[int, int]]) -> list[Axis | None]:
        keys = list(keys)
        self.certain &= self._hidden.isdisjoint(keys)
        return [self._axes.get(key) for key in keys]

    def _has_samples(self, node: Node) -> bool:
        number = self._graph.nodes[node]
        keys = [(number, place) for place in range(len(node._input_metadata))]
        known = self._at(key for key in keys if key in self._axes or key in self._hidden)
        return bool(known) and None not in known

    def orders(self) -> dict[int, tuple[Axis, tuple[Tensor, ...]]]:
        """Return what determines the order of the samples, by the number of the node that is given it."""
        orders = {}
        for node, number in self._graph.nodes.items():
            moved = ORDERED.get(node.name())
            after, of_after = node.next_functions[moved] if moved is not None else (None, 0)
            if after is None or after not in self._graph.nodes:
                continue
            inner, outer = self._axes.get((self._graph.nodes[after], of_after)), self._axes.get((number, 0))
            axis = outer if moved else inner
            if inner is not None and outer is not None and axis is not None:
                orders[number] = axis, tuple(each.clone() for each in order_of(node, axis))
        return orders

    def of_call(self, call: Call) -> Axis | None:
        """Return where the samples are in what a call returned; None: it can't provide blocks."""
        reached = [(place, edge) for place, edge in call.edges.items() if edge.node in self._graph.nodes]
        rule = call.owner.rule
        if not reached:
            return None
        if isinstance(rule, CallsRule):
            return PLAIN
        keys = [(self._graph.nodes[edge.node], edge.output_nr) for _, edge in reached]
        self._at(keys)
        known = {self._axes[key] for key in keys if key in self._axes}
        # Gradients that are zero show nothing.
        axis = known.pop() if known else PLAIN
        if known or axis is None or not all(axis.sizes(call.shapes[place], self._b) for place, _ in reached):
            self.shared = True
            return None
        if rule is None:
            return axis if axis == PLAIN and not call.drew_random_numbers else None
        (x,), (shape, *_) = call.inputs, call.shapes
        if axis == PLAIN:
            return axis if x.ndim and len(x) == self._b else None
        features = len(getattr(call.owner.module, "normalized_shape", (1,)))
        last = len(shape) - features if rule.any_places else 1
        return axis if axis.dim < last and x.shape[axis.dim] == shape[axis.dim] else None

    def entries(self, name: str, uses: Sequence[Use]) -> list[tuple[Node, Entry]]:
        """Return the inputs of nodes through which some uses of a parameter reach what has samples."""
        found: dict[tuple[Node, Entry], None] = {}
        seen: set[Node] = set()
        waiting: list[tuple[Node, int, tuple[int, int] | None]] = [
            (use.node, use.place, None) for use in uses
        ]
        while waiting:
            node, place, table = waiting.pop()
            if self._has_samples(node):
                after, of_after = node.next_functions[place]
                like = self._params[name] if table is None else after._input_metadata[of_after]
                way = way_of(node, self.of_node(node), place, torch.Size(like.shape), like.dtype)
                found[node, Entry(place, None if table else name, table or (0, 0), way)] = None
            elif node not in seen:
                seen.add(node)
                number = self._graph.nodes[node]
                waiting += [
                    (user, at, (number, of_after)) for user, at, of_after in self._users.get(node, ())
                ]
        return list(found)

    def leaks(self, call: Call, use: Use) -> bool:
        """Return whether something that a call computed from a parameter is used past the results of the call."""
        ends = {edge.node for edge in call.edges.values()}
        waiting, seen = [use.node], {use.node}
        while waiting:
            node = waiting.pop()
            for user, _, _ in () if node in ends else self._users.get(node, ()):
                if not call.contains(user):
                    return True
                if user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return False

    def ends(self, sources: Mapping[Node, Iterable[Entry]]) -> list[int]:
        """Return the numbers of the nodes with samples from which the tables of some sources are computed."""
        nodes = list(self._graph.nodes)
        tables = {entry.table[0] for entries in sources.values() for entry in entries if entry.name is None}
        waiting = [nodes[number] for number in tables]
        ends: dict[int, None] = {}
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node in seen or node not in self._graph.nodes:
                continue
            seen.add(node)
            if self._has_samples(node):
                ends[self._graph.nodes[node]] = None
            else:
                waiting += [after for after, _ in node.next_functions if after is not None]
        return list(ends)


def _guessed_axes(graph: Graph, b: int) -> Axes:
    """Return the places of the samples by the sizes of results alone."""
    axes: Axes = {}
    for node, number in graph.nodes.items():
        for place, output in enumerate(node._input_metadata):
            if output.shape:
                axes[number, place] = PLAIN if output.shape[0] == b else MAJOR if b == 1 else None
    return axes


def find_axes(
    graph: Graph, output: Tensor, params: Mapping[str, Tensor], b: int, rest: Mapping[str, Tensor]
) -> tuple[Axes, set[tuple[int, int]]]:
    """Return where the samples are in all results of a graph with its output [b, ...]; the graph stays.

    Also return those results whose gradients have zeros that hide it.
    """
    leaves = [params[name] for name in dict.fromkeys(name for name, _ in graph.uses)]
    codes = _codes(b).to(output.device, output.dtype)
    given = probe_weights(output.numel(), output.device).view(output.shape).to(output.dtype)
    first: dict[tuple[int, int], Tensor] = {}
    shapes: dict[tuple[int, int], torch.Size] = {}
    second: dict[tuple[int, int], Tensor] = {}
    places: dict[int, Tensor] = {}

    def entries(grad: Tensor) -> Tensor:
        flat, size = grad.detach().reshape(-1), grad.numel()
        if size <= MOST_ENTRIES:
            return flat
        if size not in places:
            places[size] = (size * _fractions()).long().to(grad.device)
        return flat[places[size]]

    def watch(number: int, store: dict[tuple[int, int], Tensor]) -> Any:
        def receive(grads: tuple[Tensor | None, ...]) -> None:
            for place, grad in enumerate(grads):
                if grad is not None and grad.layout == torch.strided:
                    shapes[number, place] = grad.shape
                    store[number, place] = entries(grad)

        return receive

    with without_zeros({**params, **rest}):
        for store, seeds in ((first, given), (second, given * codes.view(-1, *(1,) * (output.ndim - 1)))):
            handles = [
                node.register_prehook(watch(number, store))
                for node, number in graph.nodes.items()
                if hasattr(node, "register_prehook")
            ]
            try:
                torch.autograd.grad(output, leaves, seeds, retain_graph=True, allow_unused=True)
            finally:
                for handle in handles:
                    handle.remove()
    axes: Axes = {}
    hidden = set()
    for key, base in first.items():
        coded = second.get(key)
        if not bool(base.any()):
            hidden.add(key)
        elif coded is not None and bool(base.isfinite().all() & coded.isfinite().all()):
            size = shapes[key].numel()
            flat = places[size] if size > MOST_ENTRIES else torch.arange(size, device=base.device)
            found = _matching(shapes[key], flat, base, coded, codes.to(base.dtype))
            axes[key] = next(found, None)
            if not bool(base.all()) and next(found, None) is not None:
                hidden.add(key)
    return axes, hidden


@cache
def _fractions() -> Tensor:
    """Return numbers in [0, 1) at random; not by torch, whose random numbers a comparison replaces by constants."""
    generator = random.Random(0)
    return torch.tensor([generator.random() for _ in range(MOST_ENTRIES)], dtype=torch.float64)


def _codes(b: int) -> Tensor:
    """Return a power of two with a sign for each sample, different ones for neighbours."""
    several = [sign * 2.0**e for e in range(-EXPONENTS, EXPONENTS + 1) for sign in (1, -1)]
    codes: list[float] = []
    generator = random.Random(0)
    while len(codes) < b:
        codes += generator.sample(several, len(several))
    return torch.tensor(codes[:b])


def _matching(shape: torch.Size, flat: Tensor, base: Tensor, coded: Tensor, codes: Tensor) -> Iterator[Axis]:
    """Return the places of the samples that agree with some entries of two gradients."""
    noise = 4 * torch.finfo(base.dtype).eps * base.abs().max()
    for axis in _candidates(shape, len(codes)):
        sizes = axis.sizes(shape, len(codes))
        assert sizes is not None
        index = flat // math.prod(shape[axis.dim + 1 :]) % shape[axis.dim]
        expected = base * codes[index // sizes[1] % len(codes)]
        if bool(((coded - expected).abs() <= CLOSE * expected.abs() + noise).all()):
            yield axis


def _candidates(shape: torch.Size, b: int) -> Iterator[Axis]:
    """Return where b samples may be in a tensor, the usual places first."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % b == 0]
    for dim in fitting:
        if shape[dim] == b:
            yield Axis(dim)
    for dim in fitting:
        if shape[dim] != b:
            yield Axis(dim, 1, shape[dim] // b)
            yield Axis(dim, shape[dim] // b, 1)
    for dim in fitting:
        rest = shape[dim] // b
        yield from (Axis(dim, n, rest // n) for n in range(2, rest) if rest % n == 0)
