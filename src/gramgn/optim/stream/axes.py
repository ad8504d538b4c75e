"""Where the samples are in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Axis(NamedTuple):
    """The dimension of a tensor that holds the samples, as [before, samples, after] in this order.

    None: as many as there are. The default is a leading dimension of samples alone.
    """

    dim: int = 0
    before: int | None = 1
    after: int | None = 1

    @property
    def is_plain(self) -> bool:
        """Return whether the dimension holds nothing but the samples."""
        return self.before == 1 == self.after

    def sizes(self, shape: Sequence[int], b: int) -> tuple[int, int] | None:
        """Return the numbers before and after for b samples in a tensor of a shape; None: they don't fit."""
        if self.dim >= len(shape) or shape[self.dim] % b:
            return None
        rest = shape[self.dim] // b
        before = self.before or rest // (self.after or 1)
        after = self.after or rest // before
        return (before, after) if before * after == rest else None

    def split(self, tensor: Tensor, b: int) -> Tensor:
        """Return a tensor [b, ...] in whose other dimensions this one holds what was next to the samples."""
        sizes = self.sizes(tensor.shape, b)
        assert sizes is not None
        if self.is_plain:
            return tensor.movedim(self.dim, 0).unsqueeze(self.dim + 1)
        split = tensor.unflatten(self.dim, (sizes[0], b, sizes[1])).movedim(self.dim + 1, 0)
        return split.flatten(self.dim + 1, self.dim + 2)


PLAIN, MAJOR = Axis(), Axis(0, 1, None)
