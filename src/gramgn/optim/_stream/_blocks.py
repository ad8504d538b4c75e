"""How the rows of one parameter's Jacobian lie in memory.

G does not depend on the order of a parameter's entries, so a rule hands its block over as it was computed and
says how to find the parameter's shape in it; nothing is copied for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The order of entries of one row.

    Attributes:
        sizes: The entries' dimensions as they lie in memory.
        order: The permutation of them that gives the parameter's shape.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def to_param(self, flat: Tensor) -> Tensor:
        """Return a row in the parameter's shape."""
        return flat.view(self.sizes).permute(self.order)

    def from_param(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the parameter's shape as a row."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return tensor.permute(inverse).reshape(-1)


FLAT, SCALAR = Layout((-1,), (0,)), Layout((), ())


@dataclass(frozen=True)
class Block:
    """Per-sample gradients of one parameter.

    Attributes:
        rows: [parts, b, size]: a row's entries may lie in several parts.
        layout: Where each entry of [parts, size] belongs.
    """

    rows: Tensor
    layout: Layout

    def relaid(self, layout: Layout) -> Tensor:
        """Return the rows in another layout as [1, b, size]."""
        parts, b, size = self.rows.shape
        flat = self.rows.transpose(0, 1).reshape(b, parts * size)
        return torch.stack([layout.from_param(self.layout.to_param(row)) for row in flat])[None]


def as_block(gradients: Tensor) -> Block:
    """Return gradients [b, *shape] with the dimensions of a row as they lie in memory."""
    if gradients.ndim <= 2:
        return Block(gradients.reshape(1, len(gradients), -1), FLAT if gradients.ndim == 2 else SCALAR)
    dims = sorted(range(1, gradients.ndim), key=gradients.stride, reverse=True)
    sizes = tuple(gradients.shape[d] for d in dims)
    order = tuple(dims.index(d) for d in range(1, gradients.ndim))
    return Block(gradients.permute(0, *dims).reshape(1, len(gradients), -1), Layout(sizes, order))


Blocks = Mapping[str, "Tensor | Block"]
"""By the parameters' names in the module: blocks, or gradients [b, *shape]."""
