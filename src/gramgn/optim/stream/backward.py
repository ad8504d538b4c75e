"""The backward pass: decides which call provides the blocks of which parameter, and collects them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gramgn.optim.kept import Kept
from gramgn.optim.runtime import is_capturing, is_out_of_memory, span
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.axes import PLAIN, Axis
from gramgn.optim.stream.blocks import (
    Block,
    Blocks,
    Buffers,
    LinearFactors,
    Memory,
    as_block,
    is_cheaper,
)
from gramgn.optim.stream.capture import Call, Graph, Node, Owner, Use, read_graph
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.fallback import is_batched, module_gradients, note_missing_rules, without_advice
from gramgn.optim.stream.nodes import (
    BROADCAST,
    CALLS,
    ELEMENTWISE,
    FORMULA,
    elementwise_gradients,
    formula_of,
    gradients_by_call,
    gradients_by_calls,
    is_packed,
    order_of,
    read_saved,
)
from gramgn.optim.stream.products import Products
from gramgn.optim.stream.recurrent import Pull
from gramgn.optim.stream.rules import CallsRule, Rule, RuleMemory, linear_block, linear_factors
from gramgn.optim.stream.samples import Entry, Results
from gramgn.optim.verify import Comparison, Verifier

MOST_PLANS = 1000
"""The number of graphs of a network for which decisions are kept; the oldest are made again."""

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


@dataclass
class Network:
    """What is derived from the modules of a network, while they stay the same."""

    owners: list[Owner]
    names: dict[int, str]  # of the trained parameters, by their identity
    modes: tuple[bool, ...]  # of the modules
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)  # by their keys


@dataclass
class Memories:
    """What an engine keeps between steps."""

    conv_paths: ConvPaths
    products: Products = field(default_factory=Products)
    buffers: Buffers = field(default_factory=Buffers)
    verifier: Verifier = field(default_factory=Verifier)
    network: Kept[Network] = field(default_factory=Kept)
    warned: set[type] = field(default_factory=set)  # the module types reported as having no rule
    batches: bool = True  # whether torch.func can batch the backward passes behind tables


class Backward:
    """Turns the calls of one forward pass, which fills `calls`, into J and G.

    Attributes:
        may_mix: Whether J may agree with autograd although the network mixes samples.
    """

    def __init__(self, params: Mapping[str, Tensor], memories: Memories) -> None:
        self.params = params
        self.calls: list[Call] = []
        self.may_mix = False
        self._memories = memories
        self._nodes: list[Node] = []  # of the sources
        self._saved: list[Any] = []  # what has what each of them saved
        self._tables: dict[tuple[int, int], GradientEdge] = {}
        self._of_tables: dict[tuple[int, int], Tensor] = {}  # gradients [b, ...] in this pass
        self._waiting: dict[
            int, tuple[Tensor | None, ...]
        ] = {}  # the gradients of sources that are called later
        self._later = False
        self._inputs: list[GradientEdge | Tensor] = []
        self._captured: list[
            int
        ] = []  # the sources whose gradients the pass returns, after those of the inputs
        self._stash: dict[Call, dict[int, Tensor]] = {}
        self._gathered: set[Owner] = set()  # the owners whose calls provide one block together
        self._pulls: dict[Owner, Pull] = {}
        self._output: Tensor | None = None
        self._open = False
        self._pulling = False

    def start(self, output: Tensor, num_samples: int, network: Network) -> None:
        """Read the graph of `output` [b, ...] and decide what provides which block."""
        self.b = num_samples
        if len(output) != num_samples if output.ndim else num_samples != 1:
            raise ValueError(
                f"the model returned {list(output.shape)} for {num_samples} samples; its output must keep the "
                "batch in the leading dimension, [b] or [b, k]"
            )
        self._output = output
        if output.grad_fn is None:
            raise ValueError(
                "the model's output does not depend on a parameter through autograd: check for torch.no_grad "
                "or detach in its forward"
            )
        graph = read_graph(output, network.names)
        key = self._key(graph)
        nodes = list(graph.nodes)
        # What is decided for samples in leading dimensions holds for all other sizes.
        shapes = tuple(tuple(result.shape) for node in nodes for result in node._input_metadata)
        plan = network.plans.get(key) or network.plans.get((key, shapes))
        if plan is None or not self._follow(plan, nodes):
            plan = self._decide(graph, key, network.modes)
            network.plans[key if plan.is_plain else (key, shapes)] = plan
            if len(network.plans) > MOST_PLANS:
                del network.plans[next(iter(network.plans))]
        self._plan, self.may_mix = plan, plan.may_mix
        self._expected = dict(plan.expected)
        self._choose_gathered()
        for call in self.calls:
            if not call.active:
                call.release()
                continue
            if isinstance(call.owner.rule, CallsRule):
                call.owner.rule.check(call, self.b)
                continue
            for name in (call.owner.params[local] for local in call.active):
                self._expected[name] += self._num_slices(call) - 1
        deepest = {nodes[number] for number in plan.deepest}
        self._inputs = [
            edge for call in self.calls if call.active for edge in call.edges.values() if edge.node in deepest
        ]
        self._hook_sources(nodes)

    def run(self, slopes: Tensor, sums: Accumulator, first: int = 0, *, keep_graph: bool = False) -> None:
        """Run one backward pass per residual.

        Args:
            slopes: dr/df [samples, k, q] of the samples from number `first`.
            sums: Receives the blocks.
            first: The index of the first sample in the batch.
            keep_graph: Whether the graph is still needed afterwards.
        """
        k = slopes.shape[1]
        self._sums = sums
        self._open = True
        if self._inputs or self._captured:
            for j in range(k):
                sums.begin(first, first + self.b, j, self._expected)
                self._last = j == k - 1
                self._pass(slopes[:, j], keep=not self._last or keep_graph)
            self._pulls.clear()
        self._open = False

    def expect(self, comparison: Comparison, slopes: Tensor, first: int = 0) -> None:
        """Add autograd's J^T w to a comparison, before the blocks of J take memory; the graph stays."""
        assert self._output is not None
        for call in self.calls:
            if call.active and call.owner.rule is not None:
                call.check_unchanged()
        comparison.expect(self._output, slopes, first)

    def structure(self) -> Any:
        """Return a value that identifies the way in which the network was run."""
        return self.b, self._plan.structure, tuple(tuple(call.shapes) for call in self.calls if call.active)

    def receive(self, call: Call, place: int, grad: Tensor) -> None:
        """Take the gradient of one tensor that a call returned; called by a hook during the backward pass."""
        if not call.active or not self._open or self._pulling:
            return
        if call.owner.rule is None or call.owner in self._gathered:
            # Modules can be called again, and their calls be taken together, only after autograd has finished.
            self._stash.setdefault(call, {})[place] = grad
            return
        with span("gramgn.blocks"):
            self._apply_rule(call, call.input(), grad)
        if self._last:
            call.release()

    def _apply_rule(self, call: Call, x: Tensor, grad: Tensor) -> None:
        rule = call.owner.rule
        assert isinstance(rule, Rule)
        if call.axis != PLAIN:
            x, grad = (call.axis.split(tensor, self.b) for tensor in (x, grad))
            if not rule.any_places:
                for x_of_slice, grad_of_slice in zip(x.unbind(1), grad.unbind(1), strict=True):
                    self._apply(call, x_of_slice, grad_of_slice)
                return
        self._apply(call, x, grad)

    def _apply(self, call: Call, x: Tensor, grad: Tensor) -> None:
        module, rule, names = call.owner.module, call.owner.rule, call.owner.params
        assert isinstance(rule, Rule)
        if rule.factors is not None and self._is_factored(call, x):
            weight, bias = (names[local] if local in call.active else None for local in ("weight", "bias"))
            self._sums.add_factors(call.owner.path, rule.factors(module, x, grad, weight, bias))
            return
        buffers = self._memories.buffers
        buffers.free(names[local] for local in call.active)
        of_weight = Memory(
            buffers, partial(self._sums.rows, names.get("weight", "")), self._memories.products
        )
        memory = RuleMemory(of_weight, self._memories.conv_paths)
        self._add(names, rule.blocks(module, x, grad, call.active, memory))

    def _num_slices(self, call: Call) -> int:
        """Return into how many calls a rule takes a call apart: those with one result of each sample."""
        if not isinstance(call.owner.rule, Rule) or call.owner.rule.any_places:
            return 1
        return math.prod(call.axis.sizes(call.shapes[0], self.b) or ())

    def _add(self, names: Mapping[str, str], blocks: Blocks) -> None:
        for local, block in blocks.items():
            self._sums.add_block(names[local], block if isinstance(block, Block) else as_block(block))

    def _pass(self, slopes: Tensor, *, keep: bool) -> None:
        assert self._output is not None
        captured = [GradientEdge(self._nodes[i], 0) for i in self._captured]
        grads = torch.autograd.grad(
            self._output,
            [*self._inputs, *captured],  # type: ignore[arg-type]
            slopes.reshape(self._output.shape).to(self._output.dtype),
            retain_graph=keep or bool(self._tables) or self._later,
            allow_unused=True,
        )
        for i, grad in zip(self._captured, grads[len(self._inputs) :], strict=True):
            self._receive_source(i, (grad,))
        del grads
        for i, of_node in self._waiting.items():
            self._receive_source(i, of_node, later=True)
        self._waiting.clear()
        if self._of_tables:
            with span("gramgn.blocks"):
                self._pull()
        again = {
            call: self._stash[call] for call in self.calls if call in self._stash and not call.owner.rule
        }
        note_missing_rules(again, self._memories.warned)
        with span("gramgn.blocks"):
            for call, of_call in again.items():
                self._add(call.owner.params, module_gradients(call, of_call))
            for owner in dict.fromkeys(call.owner for call in self._stash):
                if owner in self._gathered:
                    self._add_gathered(owner)
        self._stash.clear()

    def _choose_gathered(self) -> None:
        """Choose the owners whose calls are taken together: by their rule, or linear layers with several calls."""
        calls: dict[Owner, list[Call]] = {}
        for call in self.calls:
            if call.active:
                calls.setdefault(call.owner, []).append(call)
        self._gathered = {owner for owner in calls if isinstance(owner.rule, CallsRule)}
        for owner, several in calls.items():
            alike = len({call.active for call in several}) == 1
            if len(several) > 1 and alike and owner.rule is not None and type(owner.module) is nn.Linear:
                self._gathered.add(owner)
                for local, count in Counter(local for call in several for local in call.active).items():
                    self._expected[owner.params[local]] -= count - 1

    def _linear_factors(self, calls: Sequence[Call]) -> list[LinearFactors]:
        """Return the factors of all calls of a linear layer, one call's places after the other's."""
        A, D = [], []
        for call in calls:
            if call in self._stash:
                x, grad = call.input(), self._stash[call][0]
                if call.axis != PLAIN:
                    x, grad = (call.axis.split(tensor, self.b) for tensor in (x, grad))
                factors = linear_factors(call.owner.module, x, grad, None, None)
                A.append(factors.A)
                D.append(factors.D)
        return [LinearFactors(torch.cat(A, dim=1), torch.cat(D, dim=2), "weight", "bias")]

    def _add_gathered(self, owner: Owner) -> None:
        """Add what all calls of an owner provide together."""
        rule = owner.rule
        calls = [call for call in self.calls if call.owner is owner and call.active]
        active = frozenset[str]().union(*(call.active for call in calls))
        names = {local: name for local, name in owner.params.items() if local in active}
        sums, memories = self._sums, self._memories
        with torch.autocast(sums.G.device.type, enabled=False):
            if isinstance(rule, CallsRule):
                if owner not in self._pulls:
                    for call in calls:
                        call.check_unchanged()
                    self._pulls[owner] = rule.pull(owner.module, calls, self.b)
                found = self._pulls[owner]([self._stash.get(call, {}) for call in calls])
            else:
                found = self._linear_factors(calls)
            for factors in found:
                local, factors.weight, factors.bias = (
                    factors.weight,
                    names.get(factors.weight or ""),
                    names.get(factors.bias or ""),
                )
                own, (b, T, num_inputs), num_outputs = factors.names(), factors.A.shape, factors.D.shape[3]
                if not own:
                    continue
                # Chunks of samples may differ in their numbers of steps, and factors of all must have one shape.
                alike = b == sums.b and all(self._expected[name] == 1 for name in own)
                if alike and is_cheaper(b, sums.k, T, num_inputs, num_outputs):
                    sums.add_factors(f"{owner.path}.{local}", factors)
                    continue
                memories.buffers.free(own)
                if factors.weight:
                    rows = partial(sums.rows, factors.weight)
                    memory = Memory(memories.buffers, rows, memories.products)
                    sums.add_block(factors.weight, linear_block(factors.A, factors.D[:, 0], memory))
                if factors.bias:
                    sums.add_block(factors.bias, as_block(factors.D[:, 0].sum(dim=1)))

    def _pull(self) -> None:
        """Turn the gradients of tables into those of the parameters from which they are computed."""
        edges = [self._tables[table] for table in self._of_tables]
        names, rows = self._plan.pulled, list(self._of_tables.values())
        self._of_tables.clear()
        params = [self.params[name] for name in names]

        def pull(given: Sequence[Tensor], *, batched: bool) -> Sequence[Tensor | None]:
            with without_advice():
                return torch.autograd.grad(
                    edges,
                    params,
                    given,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=batched,
                )

        self._pulling = True
        try:
            if self._memories.batches:
                try:
                    grads = pull(rows, batched=True)
                    self._memories.batches = not any(grad is not None and grad.is_sparse for grad in grads)
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise
                    self._memories.batches = False
            if not self._memories.batches:
                several = zip(*(pull(row, batched=False) for row in zip(*rows, strict=True)), strict=True)
                grads = [_stacked(each) for each in several]
        finally:
            self._pulling = False
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self._sums.add_block(name, as_block(grad))

    def _key(self, graph: Graph) -> tuple[Any, ...]:
        """Return what the decisions depend on: the calls, their places in the graph, and the graph itself."""
        start = self.calls[0].first if self.calls else 0
        key: list[Any] = [len(self.calls)]
        for call in self.calls:
            key += (call.owner, call.first - start, call.last - start, len(call.edges))
            for place, edge in call.edges.items():
                key += (place, graph.nodes.get(edge.node))
        key += [use.node._sequence_nr() - start for _, use in graph.uses]
        return tuple(key + graph.shape)

    def _follow(self, plan: Plan, nodes: Sequence[Node]) -> bool:
        """Decide as in an earlier step with the same key. Return whether tensors have shapes that allow it."""
        if not plan.certain or (plan.one and self.b > 1):
            return False
        if not is_capturing() and not all(
            _equal(order_of(nodes[number], axis), order) for number, (axis, order) in plan.orders.items()
        ):
            return False
        for call, active, axis in zip(self.calls, plan.active, plan.axes, strict=True):
            call.active, call.axis = active, axis
            if not active or isinstance(call.owner.rule, CallsRule):
                continue
            if not all(axis.sizes(shape, self.b) for shape in call.shapes):
                return False
        return all(
            axis is None or axis.sizes(output.shape, self.b)
            for source in plan.sources
            for axis, output in zip(source.axes, nodes[source.number]._input_metadata, strict=True)
        )

    def _decide(self, graph: Graph, key: tuple[Any, ...], modes: tuple[bool, ...]) -> Plan:
        """Assign each use of each parameter to a call, or to the nodes at which it meets samples."""
        if any(node.name() == "CheckpointFunctionBackward" for node in graph.nodes):
            raise ValueError(
                "re-entrant checkpointing hides layers from the optimizer: pass use_reentrant=False to "
                "torch.utils.checkpoint"
            )
        assert self._output is not None
        for call in self.calls:
            if call.owner.rule is not None and any(edge.node in graph.nodes for edge in call.edges.values()):
                call.check_unchanged()

        @cache
        def can_run_again(call: Call) -> bool:
            return call.owner.rule is None and is_batched(call)

        results = Results(graph, self._output, self.params, self.b)
        takers: dict[str, list[tuple[Call, str]]] = {name: [] for name in self.params}
        for call in self.calls:
            call.active = frozenset()
            axis = results.of_call(call)
            if axis is not None:
                call.axis = axis
                for local, name in call.owner.params.items():
                    takers[name].append((call, local))
        uses: dict[str, list[Use]] = {name: [] for name in self.params}
        for name, use in graph.uses:
            uses[name].append(use)
        sources: dict[Node, dict[Entry, None]] = {}
        pulled = []
        for name, of_name in uses.items():
            by_rule = [(call, local) for call, local in takers[name] if call.owner.rule]
            left = _give(of_name, by_rule, results)
            entries = results.entries(name, left)
            # One sample is a single call of the node.
            if self.b > 1 and any(entry.way == CALLS and not is_packed(node) for node, entry in entries):
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
        active = [call for call in self.calls if call.active]
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
            active=[call.active for call in self.calls],
            axes=[call.axis for call in self.calls],
            sources=found,
            pulled=pulled,
            ends=results.ends(sources),
            orders=results.orders(),
            certain=results.certain,
            one=self.b == 1,
            may_mix=results.shared
            or any(entry.way != ELEMENTWISE for source in found for entry in source.entries),
            deepest={graph.nodes[node] for node in graph.deepest(asked)},
            expected={name: counts[name] for name in self.params},
            # An operation more or less may mix samples, although the same modules are called.
            structure=(
                modes,
                hash(tuple(part.path if isinstance(part, Owner) else part for part in key)),
                tuple(call.axis for call in self.calls),
                tuple(source.axes for source in found),
            ),
        )

    def _hook_sources(self, nodes: Sequence[Node]) -> None:
        """Prepare the nodes with samples for the backward pass."""
        deepest = {nodes[number] for number in self._plan.deepest}
        for i, source in enumerate(self._plan.sources):
            node = nodes[source.number]
            self._nodes.append(node)
            ways = {entry.way for entry in source.entries}
            self._saved.append(read_saved(node) if source.packed and ways - CALLED else node)
            # Nodes that are called after the pass, or for the sake of others, need what they saved.
            self._later |= not ways.isdisjoint(CALLED) and (source.packed or bool(self._plan.sources[1:]))
            for entry in source.entries:
                edge: GradientEdge | Tensor
                if entry.name is None:
                    number, place = entry.table
                    edge = self._tables[entry.table] = GradientEdge(nodes[number], place)
                else:
                    edge = self.params[entry.name]
                # A node has to run, not merely be reached. The summed gradient of a parameter costs little.
                called = entry.way in CALLED and not source.packed
                if called or (entry.way == ELEMENTWISE and node in deepest):
                    self._inputs.append(edge)
            if node in deepest and (ways == {FORMULA} or source.packed):
                self._captured.append(i)
            else:
                # The hook holds a number, not the node: a node that leads to itself through Python is never freed.
                node.register_prehook(lambda grads, i=i: self._receive_source(i, grads))
        for number in self._plan.ends:
            nodes[number].register_prehook(self._end)

    def _end(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Let no gradient of a table reach what has samples again, which has its own blocks."""
        return tuple(grad if grad is None else 0 * grad for grad in grads) if self._pulling else None

    def _receive_source(self, i: int, grads: tuple[Tensor | None, ...], *, later: bool = False) -> None:
        """Take the gradients of a node's outputs; a node that is packed can be called only after the pass."""
        if not self._open or self._pulling or all(grad is None for grad in grads):
            return
        source, node = self._plan.sources[i], self._nodes[i]
        with span("gramgn.blocks"):
            for entry in source.entries:
                if source.packed and entry.way in CALLED and not later:
                    self._waiting[i] = grads
                    continue
                if later and entry.way not in CALLED:
                    continue
                rows = self._gradients(source, node, self._saved[i], entry, grads)
                if entry.name is not None:
                    self._sums.add_block(entry.name, as_block(rows))
                else:
                    held = self._of_tables.get(entry.table)
                    self._of_tables[entry.table] = rows if held is None else held + rows

    def _gradients(
        self, source: Source, node: Node, saved: Any, entry: Entry, grads: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Return the gradients [b, *shape] of an input of a node."""
        after, place = node.next_functions[entry.place]
        like = self.params[entry.name] if entry.name is not None else after._input_metadata[place]
        shape = torch.Size(like.shape)
        (axis, *_), (grad, *_) = source.axes, grads
        memories = self._memories
        if entry.way == ELEMENTWISE and grad is not None:
            return elementwise_gradients(
                node, saved, entry.place, shape, grad, memories.buffers, memories.products
            )
        formula = formula_of(node, entry.place)
        if entry.way == FORMULA and formula is not None and grad is not None and axis is not None:
            rows = formula.gradients(saved, grad, axis, shape, self.b)
        elif entry.way == BROADCAST and axis is not None:
            rows = gradients_by_call(node, grads, axis, entry.place, shape, self.b)
        else:
            rows = gradients_by_calls(node, grads, source.axes, entry.place, shape, self.b)
        return (rows.real if rows.is_complex() and not like.dtype.is_complex else rows).to(like.dtype)

    def _is_factored(self, call: Call, x: Tensor) -> bool:
        """Return whether to keep a layer's block as factors: its parameters are used once, and it is cheaper."""
        rule, names, sums = call.owner.rule, call.owner.params, self._sums
        return (
            isinstance(rule, Rule)
            and all(self._expected[names[local]] == 1 for local in call.active)
            and rule.prefers_factors(
                call.owner.module, sums.b, sums.k, tuple(x.shape), self._memories.conv_paths.policy
            )
        )

    def clear(self) -> None:
        """Release the graph, whose hooks refer to this object."""
        for call in self.calls:
            call.release()
            call.edges.clear()
        self.calls.clear()
        self._nodes, self._saved, self._tables, self._of_tables, self._later = [], [], {}, {}, False
        self._inputs, self._captured, self._output = [], [], None
        self._stash.clear()
        self._pulls.clear()


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
    return torch.stack(dense) if dense else None


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
