"""The backward pass: decides which call provides the blocks of which parameter, and collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gramgn.optim.kept import Kept
from gramgn.optim.runtime import span
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.blocks import (
    Block,
    Blocks,
    Buffers,
    Memory,
    as_block,
    is_cheaper,
)
from gramgn.optim.stream.capture import READ_THEIR_CHILDREN, Call, Graph, Owner, Use, read_graph
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.fallback import (
    elementwise_gradients,
    is_elementwise,
    is_of_parameters_alone,
    module_gradients,
    warn_once,
)
from gramgn.optim.stream.products import Products
from gramgn.optim.stream.recurrent import Pull
from gramgn.optim.stream.rules import CallsRule, Rule, RuleMemory, linear_block
from gramgn.optim.verify import Comparison, Verifier


@dataclass(frozen=True)
class Plan:
    """What provides the blocks, decided for one order of calls and one shape of the graph."""

    key: list[Any]  # equal in a later step: the same decisions hold
    active: list[frozenset[str]]  # of each call
    uses: list[int]  # the uses of parameters, by their numbers in the graph, whose own nodes provide blocks
    deepest: set[int]  # the numbers of the nodes at which gradients are asked for
    expected: dict[str, int]  # the number of blocks of each parameter
    structure: Any  # identifies the way in which the network was run, but for shapes


@dataclass
class Network:
    """What is derived from the modules of a network, while they stay the same."""

    owners: list[Owner]
    names: dict[int, str]  # of the trained parameters, by their identity
    modes: tuple[bool, ...]  # of the modules
    plan: Plan | None = None  # of the last step


@dataclass
class Memories:
    """What an engine keeps between steps."""

    conv_paths: ConvPaths
    products: Products = field(default_factory=Products)
    buffers: Buffers = field(default_factory=Buffers)
    verifier: Verifier = field(default_factory=Verifier)
    network: Kept[Network] = field(default_factory=Kept)
    warned: set[type] = field(default_factory=set)  # the module types reported as having no rule


class Backward:
    """Turns the calls of one forward pass, which fills `calls`, into J and G."""

    def __init__(self, params: Mapping[str, Tensor], memories: Memories) -> None:
        self.params = params
        self.calls: list[Call] = []
        self._memories = memories
        self._uses: list[tuple[str, Use]] = []
        self._inputs: list[GradientEdge | Tensor] = []
        self._stash: dict[Call, dict[int, Tensor]] = {}
        self._pulls: dict[Owner, Pull] = {}
        self._output: Tensor | None = None
        self._open = False

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
        plan = network.plan
        if plan is None or plan.key != key or not self._follow(plan, graph):
            plan = network.plan = self._decide(graph, key, network.modes)
        self._plan = plan
        for call in self.calls:
            if call.active:
                self._check_call(call)
            else:
                call.release()
        self._hook_uses()
        nodes = list(graph.nodes)
        deepest = {nodes[number] for number in plan.deepest}
        self._inputs = [
            edge for call in self.calls if call.active for edge in call.edges.values() if edge.node in deepest
        ]
        # A node with a use has to run, not merely be reached. The summed gradient of a parameter costs little.
        self._inputs += [self.params[name] for name, use in self._uses if use.node in deepest]

    def run(self, slopes: Tensor, sums: Accumulator, first: int = 0, *, keep_graph: bool = False) -> None:
        """Run one backward pass per residual.

        Args:
            slopes: dr/df [samples, k, q] of the samples from number `first`.
            sums: Receives the blocks.
            first: The index of the first sample in the batch.
            keep_graph: Whether the graph is still needed afterwards.
        """
        k = slopes.shape[1]
        self._sums, self._expected = sums, self._plan.expected
        self._open = True
        if self._inputs:
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
        if not call.active or not self._open:
            return
        if not isinstance(call.owner.rule, Rule):
            # Modules can be called again, and their calls be taken together, only after autograd has finished.
            self._stash.setdefault(call, {})[place] = grad
            return
        with span("gramgn.blocks"):
            self._apply_rule(call, call.input(), grad)
        if self._last:
            call.release()

    def _apply_rule(self, call: Call, x: Tensor, grad: Tensor) -> None:
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

    def _add(self, names: Mapping[str, str], blocks: Blocks) -> None:
        for local, block in blocks.items():
            self._sums.add_block(names[local], block if isinstance(block, Block) else as_block(block))

    def _pass(self, slopes: Tensor, *, keep: bool) -> None:
        assert self._output is not None
        torch.autograd.grad(
            self._output,
            self._inputs,  # type: ignore[arg-type]
            slopes.reshape(self._output.shape).to(self._output.dtype),
            retain_graph=keep,
            allow_unused=True,
        )
        with span("gramgn.blocks"):
            for call, grads in self._stash.items():
                if call.owner.rule is None:
                    warn_once(call.owner, self._memories.warned)
                    self._add(call.owner.params, module_gradients(call, grads))
            for owner in dict.fromkeys(call.owner for call in self._stash):
                if isinstance(owner.rule, CallsRule):
                    self._apply_calls_rule(owner, owner.rule)
        self._stash.clear()

    def _apply_calls_rule(self, owner: Owner, rule: CallsRule) -> None:
        calls = [call for call in self.calls if call.owner is owner and call.active]
        grads = [self._stash.get(call, {}) for call in calls]
        active = frozenset[str]().union(*(call.active for call in calls))
        names = {local: name for local, name in owner.params.items() if local in active}
        sums, memories = self._sums, self._memories
        with torch.autocast(sums.G.device.type, enabled=False):
            if owner not in self._pulls:
                for call in calls:
                    call.check_unchanged()
                self._pulls[owner] = rule.pull(owner.module, calls, self.b)
            for factors in self._pulls[owner](grads):
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

    def _key(self, graph: Graph) -> list[Any]:
        """Return what the decisions depend on: the calls, their places in the graph, and the graph itself."""
        start = self.calls[0].first if self.calls else 0
        key: list[Any] = [len(self.calls)]
        for call in self.calls:
            key += (call.owner, call.first - start, call.last - start, len(call.edges))
            for place, edge in call.edges.items():
                key += (place, graph.nodes.get(edge.node))
        key += [use.node._sequence_nr() - start for _, use in graph.uses]
        return key + graph.shape

    def _follow(self, plan: Plan, graph: Graph) -> bool:
        """Decide as in an earlier step with the same key. Return whether tensors have shapes that allow it."""
        self._uses = [graph.uses[number] for number in plan.uses]
        for call, active in zip(self.calls, plan.active, strict=True):
            call.active = active
        return all(is_elementwise(use, self.params[name], self.b) for name, use in self._uses)

    def _decide(self, graph: Graph, key: list[Any], modes: tuple[bool, ...]) -> Plan:
        """Assign each use of each parameter to a call or to its own node."""
        if any(node.name() == "CheckpointFunctionBackward" for node in graph.nodes):
            raise ValueError(
                "re-entrant checkpointing hides layers from the optimizer: pass use_reentrant=False to "
                "torch.utils.checkpoint"
            )
        takers: dict[str, list[tuple[Call, str]]] = {name: [] for name in self.params}
        for call in self.calls:
            call.active = frozenset()
            if any(edge.node in graph.nodes for edge in call.edges.values()):
                for local, name in call.owner.params.items():
                    takers[name].append((call, local))
        numbers: dict[str, list[int]] = {name: [] for name in self.params}
        for number, (name, _) in enumerate(graph.uses):
            numbers[name].append(number)
        kept: list[int] = []
        for name, of_name in numbers.items():
            uses = {number: graph.uses[number][1] for number in of_name}
            # Modules that read their children's parameters may do so with another dimension in front.
            with_rule = [
                (call, local)
                for call, local in takers[name]
                if call.owner.rule or isinstance(call.owner.module, READ_THEIR_CHILDREN)
            ]
            left = _give(uses, with_rule)
            if all(
                is_elementwise(use, self.params[name], self.b) and not is_of_parameters_alone(use.node)
                for use in left.values()
            ):
                kept += left
                continue
            left = _give(left, [(call, local) for call, local in takers[name] if not call.owner.rule])
            for use in left.values():
                raise ValueError(
                    f"parameter '{name}' is used ({use.node.name()}) outside any call of the module that owns "
                    "it, which engine='stream' would miss. Read parameters in the forward of the module that owns "
                    "them, or use engine='vmap'"
                )
        self._uses = [graph.uses[number] for number in kept]
        active = [call for call in self.calls if call.active]
        counts = Counter(name for name, _ in self._uses)
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
        asked = {edge.node for call in active for edge in call.edges.values()}
        asked |= {use.node for _, use in self._uses}
        return Plan(
            key=key,
            active=[call.active for call in self.calls],
            uses=kept,
            deepest={graph.nodes[node] for node in graph.deepest(asked)},
            expected={name: counts[name] for name in self.params},
            # An operation more or less may mix samples, although the same modules are called.
            structure=(modes, hash(tuple(part.path if isinstance(part, Owner) else part for part in key))),
        )

    def _check_call(self, call: Call) -> None:
        if isinstance(call.owner.rule, CallsRule):
            call.owner.rule.check(call, self.b)
            return
        if any(not shape or shape[0] != self.b for shape in call.shapes):
            raise ValueError(
                f"{call.owner} returned {[list(shape) for shape in call.shapes]} inside a network called with "
                f"{self.b} samples: engine='stream' needs the samples in the leading dimension of every layer "
                f"with parameters; use engine='{'rows' if isinstance(call.owner.module, nn.RNNBase) else 'vmap'}'"
            )
        if call.owner.rule is None and call.drew_random_numbers:
            raise ValueError(
                f"{call.owner} has no rule and draws random numbers, so it can't be called again: "
                "use engine='vmap'"
            )

    def _hook_uses(self) -> None:
        for i, (_, use) in enumerate(self._uses):
            # The hook holds a number, not the node: a node that leads to itself through Python is never freed.
            use.node.register_prehook(lambda grads, i=i: self._receive_use(i, grads[0]))

    def _receive_use(self, i: int, grad: Tensor | None) -> None:
        if grad is None or not self._open:
            return
        name, use = self._uses[i]
        with span("gramgn.blocks"):
            memories = self._memories
            gradients = elementwise_gradients(
                use, self.params[name], grad, memories.buffers, memories.products
            )
            self._sums.add_block(name, as_block(gradients))

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
        self._inputs, self._uses, self._output = [], [], None
        self._stash.clear()
        self._pulls.clear()


def _give(uses: dict[int, Use], takers: list[tuple[Call, str]]) -> dict[int, Use]:
    """Let each call take the uses of a parameter that happened in it. Return the remaining uses, by number."""
    left = uses
    for call, local in takers:
        taken = {number for number, use in uses.items() if call.contains(use.node)}
        if taken:
            call.active |= {local}
            left = {number: use for number, use in left.items() if number not in taken}
    return left
