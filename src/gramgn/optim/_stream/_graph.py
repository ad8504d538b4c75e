"""What the autograd graph of one forward pass says: every use of every trained parameter."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Node = Any
"""A node of autograd's graph; torch has no complete type for it."""


@dataclass(frozen=True)
class Use:
    """A node that takes a parameter at one of its places."""

    node: Node
    place: int


@dataclass(frozen=True)
class Graph:
    """Nodes from the output on, each after all that it leads to, and the uses of each parameter by name.

    While it lives, a node is the same Python object whenever it is met.
    """

    order: list[Node]
    uses: dict[str, list[Use]]

    def deepest(self, among: Set[Node]) -> set[Node]:
        """Return those of some nodes that lead to no other of them."""
        leading: set[Node] = set()
        found = set()
        for node in self.order:
            if any(after in leading or after in among for after, _ in node.next_functions):
                leading.add(node)
            elif node in among:
                found.add(node)
        return found


def read_graph(output: Tensor, params: Mapping[str, Tensor]) -> Graph:
    """Walk the graph of ``output``.

    Raises:
        ValueError: Part of the network ran outside of the graph, in re-entrant checkpointing.
    """
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
