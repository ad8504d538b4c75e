"""The backward pass: who gives a block for which parameter, and the blocks as gradients arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gramgn.optim._stream import _elementwise, _fallback
from gramgn.optim._stream._accumulator import Accumulator
from gramgn.optim._stream._buffers import Buffers
from gramgn.optim._stream._capture import Call
from gramgn.optim._stream._graph import Graph, Use, read_graph
from gramgn.optim._stream._mixing import MixingCheck


class Backward:
    """One forward pass's calls, turned into J and G.

    Args:
        params: The trained parameters by name.
        buffers: Memory that rules use.
        checked: What was found not to mix samples in earlier steps.
    """

    def __init__(self, params: Mapping[str, Tensor], buffers: Buffers, checked: set[Any]) -> None:
        self.params = params
        self.calls: list[Call] = []
        self._buffers = buffers
        self._checked = checked
        self._uses: list[tuple[str, Use]] = []
        self._inputs: list[GradientEdge | Tensor] = []
        self._stash: dict[Call, dict[int, Tensor]] = {}
        self._output: Tensor | None = None
        self._j = 0

    def start(self, output: Tensor, num_samples: int) -> None:
        """Read the graph of ``output`` [b, ...] and decide who gives which block.

        Raises:
            ValueError: A use of a parameter is covered by none.
        """
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

    def run(self, slopes: Tensor) -> Accumulator:
        """Go backward once for each residual of slopes dr/df [b, k, q] and return J and G."""
        k = slopes.shape[1]
        self._expected = self._count()
        self._sums = Accumulator(self.params, self.b, k, self._expected)
        self._mixing = MixingCheck(self._keys(), self._checked, self.b)
        if self._inputs:
            if self._mixing.wanted:
                self._mixing.weighing = True
                self._pass(self._mixing.weighted(slopes[:, 0]), keep=True)
                self._mixing.weighing = False
            for self._j in range(k):
                self._pass(slopes[:, self._j], keep=self._j < k - 1)
        self._mixing.finish()
        self._sums.finish()
        self._buffers.keep(self._sums.blocks)
        return self._sums

    def receive(self, call: Call, place: int, grad: Tensor) -> None:
        """Take the gradient of one tensor that a call returned; a hook in the backward pass calls this."""
        if not call.active:
            return
        if self._mixing.sees((call.owner.path, place, self.b, self.calls.index(call)), grad):
            return
        if call.owner.rule is None:
            # Calling modules again has to wait until autograd is done.
            self._stash.setdefault(call, {})[place] = grad
            return
        x, names = call.input(), call.owner.params
        if self._is_factored(call):
            self._sums.add_factors(
                call,
                x,
                grad,
                self._j,
                *(names[local] if local in call.active else None for local in ("weight", "bias")),
            )
        else:
            self._buffers.free(names[local] for local in call.active)
            blocks = call.owner.rule.blocks(call.owner.module, x, grad, call.active, self._buffers)
            for local, block in blocks.items():
                self._sums.add_block(names[local], block, self._j)
        if self._j == self._sums.k - 1:
            call.release()

    def _pass(self, slopes: Tensor, *, keep: bool) -> None:
        assert self._output is not None
        torch.autograd.grad(
            self._output,
            self._inputs,  # type: ignore[arg-type]
            slopes.reshape(self._output.shape),
            retain_graph=keep,
            allow_unused=True,
        )
        if self._mixing.weighing:
            return
        for call, grads in self._stash.items():
            prefix = "model." if call.owner.path == "" else ""
            for local, block in _fallback.blocks(call, grads, prefix).items():
                self._sums.add_block(call.owner.params[local], block, self._j)
        self._stash.clear()

    def _assign(self, graph: Graph) -> None:
        """Give each use of each parameter to a call or to its own node."""
        reached = set(graph.order)
        takers: dict[str, list[tuple[Call, str]]] = {name: [] for name in self.params}
        for call in self.calls:
            if any(edge.node in reached for edge in call.edges.values()):
                for local, name in call.owner.params.items():
                    takers[name].append((call, local))
        for name, uses in graph.uses.items():
            with_rule = [(call, local) for call, local in takers[name] if call.owner.rule]
            left = _give(uses, with_rule)
            if all(_elementwise.is_elementwise(use, self.params[name], self.b) for use in left):
                self._uses += [(name, use) for use in left]
                continue
            left = _give(left, [(call, local) for call, local in takers[name] if not call.owner.rule])
            if left:
                raise ValueError(_not_covered(name, left[0]))
        for call in self.calls:
            if call.active:
                self._check_call(call)
            else:
                call.release()

    def _check_call(self, call: Call) -> None:
        owner = call.owner
        what = f"'{owner.path or 'the model'}' ({type(owner.module).__name__})"
        if any(not shape or shape[0] != self.b for shape in call.shapes):
            raise ValueError(
                f"{what} returned {[list(shape) for shape in call.shapes]} inside a network called with "
                f"{self.b} samples: engine='stream' needs the samples in the leading dimension of every layer "
                "with parameters; take engine='vmap'"
            )
        if owner.rule is None and call.random:
            raise ValueError(
                f"{what} has no rule and draws random numbers, so it can't be called again: "
                "take engine='vmap'"
            )

    def _hook_uses(self) -> None:
        for i, (_, use) in enumerate(self._uses):
            # The hook knows a number, not the node: a node that leads to itself through Python is never freed.
            use.node.register_prehook(lambda grads, i=i: self._receive_use(i, grads[0]))

    def _receive_use(self, i: int, grad: Tensor | None) -> None:
        name, use = self._uses[i]
        if grad is None or self._mixing.sees((name, i, self.b, use.node.name()), grad):
            return
        self._sums.add_block(name, _elementwise.block(use, self.params[name], grad), self._j)

    def _choose_inputs(self, graph: Graph) -> None:
        """Ask autograd for the gradients at the deepest places only: those on the way are seen by hooks."""
        edges: dict[Any, list[GradientEdge | Tensor]] = {}
        for call in self.calls:
            if call.active:
                for edge in call.edges.values():
                    edges.setdefault(edge.node, []).append(edge)
        for name, use in self._uses:
            # Its node has to run, not only to be reached; the summed gradient of one such is no great cost.
            edges.setdefault(use.node, []).append(self.params[name])
        self._inputs = [edge for node in graph.deepest(edges.keys()) for edge in edges[node]]

    def _count(self) -> dict[str, int]:
        counts = Counter(name for name, _ in self._uses)
        for call in self.calls:
            counts.update(call.owner.params[local] for local in call.active)
        return {name: counts[name] for name in self.params}

    def _keys(self) -> list[Any]:
        """Return names of the places at which gradients will arrive."""
        keys: list[Any] = [
            (call.owner.path, place, self.b, i)
            for i, call in enumerate(self.calls)
            if call.active
            for place in call.edges
        ]
        return keys + [(name, i, self.b, use.node.name()) for i, (name, use) in enumerate(self._uses)]

    def _is_factored(self, call: Call) -> bool:
        """Return whether the block of a linear layer can stay a product: one input row for each sample."""
        rule, names = call.owner.rule, call.owner.params
        return (
            rule is not None
            and rule.factored
            and len(call.shapes[0]) == 2
            and all(self._expected[names[local]] == 1 for local in call.active)
        )

    def clear(self) -> None:
        """Let the graph go: its hooks lead back here."""
        for call in self.calls:
            call.release()
            call.edges.clear()
        self.calls.clear()
        self._inputs, self._uses, self._output = [], [], None
        self._stash.clear()


def _give(uses: list[Use], takers: list[tuple[Call, str]]) -> list[Use]:
    """Let each call take a parameter's uses that happened in it; return the uses that are left."""
    left = list(uses)
    for call, local in takers:
        if any(call.contains(use.node) for use in uses):
            call.active |= {local}
            left = [use for use in left if not call.contains(use.node)]
    return left


def _not_covered(name: str, use: Use) -> str:
    return (
        f"parameter '{name}' is used ({use.node.name()}) outside of a call of the module that owns it: "
        "engine='stream' would miss that. Read parameters in the forward of the module that owns them, or take "
        "engine='vmap'"
    )
