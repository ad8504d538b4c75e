"""The backward pass: collects the blocks as planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gramgn.optim.kept import Kept
from gramgn.optim.runtime import is_out_of_memory, span
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.axes import PLAIN
from gramgn.optim.stream.blocks import (
    Block,
    Blocks,
    Buffers,
    LinearFactors,
    Memory,
    as_block,
    is_cheaper,
)
from gramgn.optim.stream.capture import Call, Node, Owner, read_graph
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.fallback import module_gradients, note_missing_rules, without_advice
from gramgn.optim.stream.nodes import (
    BROADCAST,
    ELEMENTWISE,
    FORMULA,
    elementwise_gradients,
    formula_of,
    gradients_by_call,
    gradients_by_calls,
    read_saved,
)
from gramgn.optim.stream.plan import CALLED, Plan, Source, decide, follow, key_of
from gramgn.optim.stream.products import Products
from gramgn.optim.stream.recurrent import Pull
from gramgn.optim.stream.rules import CallsRule, Rule, RuleMemory, linear_block, linear_factors
from gramgn.optim.stream.samples import Entry
from gramgn.optim.verify import Comparison, Verifier

MOST_PLANS = 1000
"""The number of graphs of a network for which decisions are kept; the oldest are made again."""


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

    Args:
        params: The parameters whose blocks are formed.
        memories: What is kept between steps.
        rest: Parameters whose blocks are formed at another time, if there are any.

    Attributes:
        may_mix: Whether J may agree with autograd although the network mixes samples.
    """

    def __init__(
        self, params: Mapping[str, Tensor], memories: Memories, rest: Mapping[str, Tensor] | None = None
    ) -> None:
        self.params, self._rest = params, rest or {}
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
        key = key_of(self.calls, graph)
        nodes = list(graph.nodes)
        plan = network.plans.get(key) or network.plans.get(_with_sizes(key, nodes))
        if plan is None or not follow(plan, self.calls, nodes, num_samples):
            paths = tuple(part.path if isinstance(part, Owner) else part for part in key)
            # An operation more or less may mix samples, although the same modules are called.
            structure = network.modes, hash(paths)
            plan = decide(self.calls, graph, output, self.params, self.b, structure, self._rest)
            network.plans[key if plan.is_plain else _with_sizes(key, nodes)] = plan
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

    def run(
        self,
        slopes: Tensor,
        sums: Accumulator,
        first: int = 0,
        *,
        keep_graph: bool = False,
        again: bool = False,
    ) -> None:
        """Run one backward pass per residual.

        Args:
            slopes: dr/df [samples, k, q] of the samples from number `first`.
            sums: Receives the blocks.
            first: The index of the first sample in the batch.
            keep_graph: Whether the graph is still needed afterwards.
            again: Whether it is run again, so that the arguments of calls are needed as well.
        """
        k = slopes.shape[1]
        self._sums = sums
        self._open = True
        if self._inputs or self._captured:
            for j in range(k):
                sums.begin(first, first + self.b, j, self._expected)
                self._last = j == k - 1 and not again
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
        with torch.autocast(next(iter(self.params.values())).device.type, enabled=False):
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
                if alike and is_cheaper(sums.grams.num_samples, sums.k, T, num_inputs, num_outputs):
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
                call.owner.module,
                sums.grams.num_samples,
                sums.k,
                tuple(x.shape),
                self._memories.conv_paths.policy,
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


def _with_sizes(key: Any, nodes: Sequence[Node]) -> tuple[Any, ...]:
    """Return the key of what holds for these sizes only: samples are in other dimensions than the leading one."""
    return key, tuple(tuple(output.shape) for node in nodes for output in node._input_metadata)


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
    return torch.stack(dense) if dense else None
