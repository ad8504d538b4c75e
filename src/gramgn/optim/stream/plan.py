"""What provides the blocks of each parameter: calls of modules, or nodes at which something meets samples.

Decided once per shape of the graph, and followed in later steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramgn.optim.runtime import is_capturing
from gramgn.optim.stream.axes import PLAIN, Axis
from gramgn.optim.stream.capture import Call, Graph, Node, Use
from gramgn.optim.stream.fallback import is_batched
from gramgn.optim.stream.nodes import BROADCAST, CALLS, ELEMENTWISE, is_packed, order_of
from gramgn.optim.stream.rules import CallsRule
from gramgn.optim.stream.samples import Entry, Results

CALLED = {BROADCAST, CALLS}
"""Ways for which the node is called."""


class Source(NamedTuple):
    """A node with samples, and its inputs that have none."""

    number: int  # of the node
    axes: tuple[Axis | None, ...]  # where the samples are in each of its outputs
    packed: bool  # whether what it saved can be read only once in a pass
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Plan:
    """What provides the blocks, decided for one order of calls and one shape of the graph."""

    active: list[frozenset[str]]  # of each call
    axes: list[Axis]  # of each call
    sources: list[Source]
    pulled: list[str]  # the parameters from which tables without samples are computed
    ends: list[int]  # the numbers of nodes with samples from which tables are computed as well
    may_mix: bool  # whether J may be right although the network mixes samples
    orders: dict[int, tuple[Axis, tuple[Tensor, ...]]]  # by number of a node, what it orders the samples by
    certain: bool  # whether the places of the samples could be seen
    one: bool  # whether there was one sample, which says nothing about the place of more
    deepest: set[int]  # the numbers of the nodes at which gradients are asked for
    expected: dict[str, int]  # the number of blocks of each parameter
    structure: Any  # identifies the way in which the network was run, but for shapes

    @property
    def is_plain(self) -> bool:
        """Whether samples are in leading dimensions everywhere."""
        axes = {axis for source in self.sources for axis in source.axes}.union(self.axes)
        return axes <= {PLAIN, None} and not self.ends


def key_of(calls: Sequence[Call], graph: Graph) -> tuple[Any, ...]:
    """Return what the decisions depend on: the calls, their places in the graph, and the graph itself."""
    start = calls[0].first if calls else 0
    key: list[Any] = [len(calls)]
    for call in calls:
        key += (call.owner, call.first - start, call.last - start, len(call.edges))
        for place, edge in call.edges.items():
            key += (place, graph.nodes.get(edge.node))
    key += [use.node._sequence_nr() - start for _, use in graph.uses]
    return tuple(key + graph.shape)


def follow(plan: Plan, calls: Sequence[Call], nodes: Sequence[Node], b: int) -> bool:
    """Decide as in an earlier step with the same key. Return whether tensors have shapes that allow it."""
    if not plan.certain or (plan.one and b > 1):
        return False
    if not is_capturing() and not all(
        _equal(order_of(nodes[number], axis), order) for number, (axis, order) in plan.orders.items()
    ):
        return False
    for call, active, axis in zip(calls, plan.active, plan.axes, strict=True):
        call.active, call.axis = active, axis
        if not active or isinstance(call.owner.rule, CallsRule):
            continue
        if not all(axis.sizes(shape, b) for shape in call.shapes):
            return False
    return all(
        axis is None or axis.sizes(output.shape, b)
        for source in plan.sources
        for axis, output in zip(source.axes, nodes[source.number]._input_metadata, strict=True)
    )


def decide(
    calls: Sequence[Call],
    graph: Graph,
    output: Tensor,
    params: Mapping[str, Tensor],
    b: int,
    structure: tuple[Any, ...],
    rest: Mapping[str, Tensor],
) -> Plan:
    """Assign each use of each parameter to a call, or to the nodes at which it meets samples.

    Args:
        calls: The calls of the modules that own parameters; their `active` and `axis` are set.
        graph: The graph of the output.
        output: [b, ...].
        params: The trained parameters by name.
        b: The number of samples.
        structure: Identifies the way in which the network was run; the places of the samples are added.
        rest: Parameters whose blocks are formed at another time.

    Raises:
        ValueError: The graph cannot be taken apart.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in graph.nodes):
        raise ValueError(
            "re-entrant checkpointing hides layers from the optimizer: pass use_reentrant=False to "
            "torch.utils.checkpoint"
        )
    for call in calls:
        if call.owner.rule is not None and any(edge.node in graph.nodes for edge in call.edges.values()):
            call.check_unchanged()

    @cache
    def can_run_again(call: Call) -> bool:
        return call.owner.rule is None and is_batched(call)

    results = Results(graph, output, params, b, rest)
    takers: dict[str, list[tuple[Call, str]]] = {name: [] for name in params}
    for call in calls:
        call.active = frozenset()
        axis = results.of_call(call)
        if axis is not None:
            call.axis = axis
            for local, name in call.owner.params.items():
                takers[name].append((call, local))
    uses: dict[str, list[Use]] = {name: [] for name in params}
    for name, use in graph.uses:
        uses[name].append(use)
    sources: dict[Node, dict[Entry, None]] = {}
    pulled = []
    for name, of_name in uses.items():
        by_rule = [(call, local) for call, local in takers[name] if call.owner.rule]
        left = _give(of_name, by_rule, results)
        entries = results.entries(name, left)
        # One sample is a single call of the node.
        if b > 1 and any(entry.way == CALLS and not is_packed(node) for node, entry in entries):
            others = [(call, local) for call, local in takers[name] if can_run_again(call)]
            left = _give(left, others, results)
            entries = results.entries(name, left)
        for node, entry in entries:
            sources.setdefault(node, {})[entry] = None
        if any(entry.name is None for _, entry in entries):
            pulled.append(name)
    found = [
        Source(graph.nodes[node], results.of_node(node), is_packed(node), tuple(of_node))
        for node, of_node in sources.items()
    ]
    active = [call for call in calls if call.active]
    counts = Counter(entry.name for source in found for entry in source.entries)
    counts.update(pulled)
    for call in active:
        if not isinstance(call.owner.rule, CallsRule):
            counts.update(call.owner.params[local] for local in call.active)
    # All calls of such an owner provide one block.
    together = {
        (call.owner, local)
        for call in active
        if isinstance(call.owner.rule, CallsRule)
        for local in call.active
    }
    counts.update(owner.params[local] for owner, local in together)
    # Autograd is asked only for the gradients at the deepest nodes; hooks see all others on the way there.
    asked = {edge.node for call in active for edge in call.edges.values()} | set(sources)
    return Plan(
        active=[call.active for call in calls],
        axes=[call.axis for call in calls],
        sources=found,
        pulled=pulled,
        ends=results.ends(sources),
        orders=results.orders(),
        certain=results.certain,
        one=b == 1,
        may_mix=results.shared
        or any(entry.way != ELEMENTWISE for source in found for entry in source.entries),
        deepest={graph.nodes[node] for node in graph.deepest(asked)},
        expected={name: counts[name] for name in params},
        structure=(
            *structure,
            tuple(call.axis for call in calls),
            tuple(source.axes for source in found),
        ),
    )


def _equal(given: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    return len(given) == len(before) and all(map(torch.equal, given, before))


def _give(uses: list[Use], takers: list[tuple[Call, str]], results: Results) -> list[Use]:
    """Let each call take the uses of a parameter that happened in it. Return the remaining uses."""
    left = uses
    for call, local in takers:
        taken = [use for use in uses if call.contains(use.node) and not results.leaks(call, use)]
        if taken:
            call.active |= {local}
            left = [use for use in left if use not in taken]
    return left
