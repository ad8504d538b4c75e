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

from gramgn.optim.kernels import Kernels
from gramgn.optim.runtime import span
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.blocks import Block, Blocks, Buffers, Memory, as_block
from gramgn.optim.stream.capture import READ_THEIR_CHILDREN, Call, Graph, Use, read_graph
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.fallback import elementwise_gradients, is_elementwise, module_gradients, warn_once
from gramgn.optim.stream.rules import RuleMemory
from gramgn.optim.stream.verify import Verifier


@dataclass
class Memories:
    """What an engine keeps between steps."""

    conv_paths: ConvPaths
    kernels: Kernels | None = None
    buffers: Buffers = field(default_factory=Buffers)
    verifier: Verifier = field(default_factory=Verifier)
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
        self._output: Tensor | None = None
        self._open = False

    def start(self, output: Tensor, num_samples: int) -> None:
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
        graph = read_graph(output, self.params)
        self._assign(graph)
        self._hook_uses()
        self._choose_inputs(graph)

    def run(self, slopes: Tensor, sums: Accumulator, first: int = 0, *, keep_graph: bool = False) -> None:
        """Run one backward pass per residual.

        Args:
            slopes: dr/df [samples, k, q] of the samples from number `first`.
            sums: Receives the blocks.
            first: The index of the first sample in the batch.
            keep_graph: Whether the graph is still needed afterwards.
        """
        k = slopes.shape[1]
        self._sums, self._expected = sums, self._count()
        if sums.comparison is not None:
            # Before the blocks of J take memory. The backward passes below still need the graph.
            assert self._output is not None
            for call in self.calls:
                if call.active and call.owner.rule is not None:
                    call.check_unchanged()
            sums.comparison.expect(self._output, slopes, first)
        self._open = True
        if self._inputs:
            for j in range(k):
                sums.begin(first, first + self.b, j, self._expected)
                self._last = j == k - 1
                self._pass(slopes[:, j], keep=not self._last or keep_graph)
        self._open = False

    def structure(self, model: nn.Module) -> Any:
        """Return a value that identifies the way in which the network was run."""
        return (
            self.b,
            tuple(module.training for module in model.modules()),
            tuple((call.owner.path, *call.shapes) for call in self.calls if call.active),
            tuple((name, use.node.name(), use.place) for name, use in self._uses),
        )

    def receive(self, call: Call, place: int, grad: Tensor) -> None:
        """Take the gradient of one tensor that a call returned; called by a hook during the backward pass."""
        if not call.active or not self._open:
            return
        if call.owner.rule is None:
            # Modules can be called again only after autograd has finished.
            self._stash.setdefault(call, {})[place] = grad
            return
        with span("gramgn.blocks"):
            self._apply_rule(call, call.input(), grad)
        if self._last:
            call.release()

    def _apply_rule(self, call: Call, x: Tensor, grad: Tensor) -> None:
        module, rule, names = call.owner.module, call.owner.rule, call.owner.params
        assert rule is not None
        if rule.factors is not None and self._is_factored(call, x):
            weight, bias = (names[local] if local in call.active else None for local in ("weight", "bias"))
            self._sums.add_factors(call.owner.path, rule.factors(module, x, grad, weight, bias))
            return
        buffers = self._memories.buffers
        buffers.free(names[local] for local in call.active)
        of_weight = Memory(buffers, partial(self._sums.rows, names.get("weight", "")))
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
        for call, grads in self._stash.items():
            warn_once(call.owner, self._memories.warned)
            with span("gramgn.blocks"):
                self._add(call.owner.params, module_gradients(call, grads))
        self._stash.clear()

    def _assign(self, graph: Graph) -> None:
        """Assign each use of each parameter to a call or to its own node."""
        reached = set(graph.order)
        takers: dict[str, list[tuple[Call, str]]] = {name: [] for name in self.params}
        for call in self.calls:
            if any(edge.node in reached for edge in call.edges.values()):
                for local, name in call.owner.params.items():
                    takers[name].append((call, local))
        for name, uses in graph.uses.items():
            # Modules that read their children's parameters may do so with another dimension in front.
            with_rule = [
                (call, local)
                for call, local in takers[name]
                if call.owner.rule or isinstance(call.owner.module, READ_THEIR_CHILDREN)
            ]
            left = _give(uses, with_rule)
            if all(is_elementwise(use, self.params[name], self.b) for use in left):
                self._uses += [(name, use) for use in left]
                continue
            left = _give(left, [(call, local) for call, local in takers[name] if not call.owner.rule])
            if left:
                raise ValueError(
                    f"parameter '{name}' is used ({left[0].node.name()}) outside any call of the module that owns "
                    "it, which engine='stream' would miss. Read parameters in the forward of the module that owns "
                    "them, or use engine='vmap'"
                )
        for call in self.calls:
            if call.active:
                self._check_call(call)
            else:
                call.release()

    def _check_call(self, call: Call) -> None:
        if any(not shape or shape[0] != self.b for shape in call.shapes):
            raise ValueError(
                f"{call.owner} returned {[list(shape) for shape in call.shapes]} inside a network called with "
                f"{self.b} samples: engine='stream' needs the samples in the leading dimension of every layer "
                "with parameters; use engine='vmap'"
            )
        if call.owner.rule is None and call.random:
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
            gradients = elementwise_gradients(use, self.params[name], grad, self._memories.buffers)
            self._sums.add_block(name, as_block(gradients))

    def _choose_inputs(self, graph: Graph) -> None:
        """Ask autograd only for the gradients at the deepest nodes; hooks see all others on the way there."""
        edges: dict[Any, list[GradientEdge | Tensor]] = {}
        for call in self.calls:
            if call.active:
                for edge in call.edges.values():
                    edges.setdefault(edge.node, []).append(edge)
        for name, use in self._uses:
            # The node has to run, not merely be reached. The summed gradient of one such parameter costs little.
            edges.setdefault(use.node, []).append(self.params[name])
        self._inputs = [edge for node in graph.deepest(edges.keys()) for edge in edges[node]]

    def _count(self) -> dict[str, int]:
        """Return the number of blocks to expect for each parameter."""
        counts = Counter(name for name, _ in self._uses)
        for call in self.calls:
            counts.update(call.owner.params[local] for local in call.active)
        return {name: counts[name] for name in self.params}

    def _is_factored(self, call: Call, x: Tensor) -> bool:
        """Return whether to keep a layer's block as factors: its parameters are used once, and it is cheaper."""
        rule, names, sums = call.owner.rule, call.owner.params, self._sums
        return (
            rule is not None
            and all(self._expected[names[local]] == 1 for local in call.active)
            and rule.prefers_factors(call.owner.module, sums.b, sums.k, tuple(x.shape))
        )

    def clear(self) -> None:
        """Release the graph, whose hooks refer to this object."""
        for call in self.calls:
            call.release()
            call.edges.clear()
        self.calls.clear()
        self._inputs, self._uses, self._output = [], [], None
        self._stash.clear()


def _give(uses: list[Use], takers: list[tuple[Call, str]]) -> list[Use]:
    """Let each call take the uses of a parameter that happened in it. Return the remaining uses."""
    left = list(uses)
    for call, local in takers:
        if any(call.contains(use.node) for use in uses):
            call.active |= {local}
            left = [use for use in left if not call.contains(use.node)]
    return left
