"""Assembles J and G from the layers' blocks as they arrive.

b samples, k residuals per sample; rows of J are ordered by (sample, residual).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramgn.optim.closure import Trained
from gramgn.optim.gram import symmetric
from gramgn.optim.runtime import float64_home, full_precision_products, product_dtype, span, zero_gram
from gramgn.optim.stream.blocks import Block, Buffers, Factors, Layout, LinearFactors, joined, weighted
from gramgn.optim.stream.products import Products
from gramgn.optim.verify import Comparison

SMALL = 64
"""Blocks of at most this many columns are concatenated before they are multiplied."""


@dataclass
class Held:
    """The rows of one parameter that have arrived so far."""

    rows: Tensor  # [parts, b k, size], or [parts, b, size] for the only residual
    layout: Layout  # the place of each entry in the parameter
    own: bool  # whether the accumulator owns the memory and may add to it


@dataclass(frozen=True)
class SmallBlocks:
    """Blocks of few columns of several parameters, concatenated."""

    names: list[str]
    sizes: list[int]  # the number of columns of each
    layouts: list[Layout]
    rows: Tensor  # [1, b k, sum of sizes]

    def pulled(self, u: Tensor, products: Products) -> dict[str, Tensor]:
        """Return each parameter's part of J^T u in the parameter's shape."""
        columns = products.vector_times_rows(u, self.rows)[0].split(self.sizes)
        return {
            name: layout.to_param(column)
            for name, layout, column in zip(self.names, self.layouts, columns, strict=True)
        }


class GramSum:
    """Sums G over the blocks of J, each of which is final when it is added.

    Args:
        trained: The trained parameters.
        num_samples: b, which decides between rows and factors.
        num_rows: n.
        products: Multiplies the blocks.
    """

    rehearsal: GramSum | None = None
    """What is to see the blocks of a backward pass before this sum does; see `agree`."""

    def __init__(self, trained: Trained, num_samples: int, num_rows: int, products: Products) -> None:
        self.num_samples = num_samples
        self._group = dict(zip(trained.params, trained.groups, strict=True))
        self._products = products
        device = next(iter(trained.params.values())).device
        self.G = zero_gram(trained.num_groups, num_rows, device)

    def add_rows(self, names: Sequence[str], layouts: Sequence[Layout], rows: Tensor) -> None:
        """Add the rows [parts, n, size] of parameters of one group, which lie next to each other."""
        self.G[self._group[names[0]]].add_(self._products.gram(rows))

    def add_factors(self, factors: Factors) -> None:
        """Add the factors of parameters of one group."""
        product = factors.gram(self._products)
        self.G[self._group[factors.names()[0]]].add_(product.to(self.G.device))

    def finish(self) -> Tensor:
        """Return G by group, exactly symmetric."""
        self.G = symmetric(self.G)
        return self.G

    def agree(self) -> None:
        """Follow the rehearsal."""

    def norm(self) -> float:
        """Return the Frobenius norm of J."""
        return float(self.G.diagonal(dim1=1, dim2=2).sum().clamp(min=0).sqrt())


class Accumulator:
    """Takes per-sample gradients in any order. All blocks of a parameter are summed before they are multiplied.

    Args:
        trained: The trained parameters.
        num_samples: b.
        num_residuals: k.
        buffers: Memory for the blocks.
        products: Multiplies the blocks.
        grams: Takes the blocks and returns G; None (default): a `GramSum`.
        drop: Release each block once it has been multiplied.
        comparison: Receives J^T w if the Jacobian is to be compared with autograd in this step.
        watched: The parameters whose blocks' norms are wanted.
    """

    def __init__(
        self,
        trained: Trained,
        num_samples: int,
        num_residuals: int,
        buffers: Buffers,
        products: Products,
        *,
        grams: GramSum | None = None,
        drop: bool = False,
        comparison: Comparison | None = None,
        watched: Collection[str] = (),
    ) -> None:
        self.comparison = comparison
        self.watched, self.norms = watched, dict[str, Tensor]()
        self.trained = trained
        self.b, self.k = num_samples, num_residuals
        self.held: dict[str, Held] = {}
        self.small: list[SmallBlocks] = []
        self.factors: dict[str, Factors] = {}
        self._parts: dict[str, list[tuple[int, Factors]]] = {}  # with the first sample of each
        self._factored: set[str] = set()  # the parameters among them
        self.products = products
        self._buffers, self._drop = buffers, drop
        self._group = dict(zip(trained.params, trained.groups, strict=True))
        self._multiplied: set[str] = set()
        self._range, self._j = (0, num_samples), 0
        self._expected: Mapping[str, int] = {}
        self._arrived: dict[str, int] = {}
        self.grams = grams or GramSum(trained, num_samples, num_samples * num_residuals, products)

    def begin(self, start: int, stop: int, j: int, expected: Mapping[str, int]) -> None:
        """Announce residual j of the samples `start` to `stop` - 1, with `expected` blocks per parameter."""
        self._range, self._j = (start, stop), j
        self._expected, self._arrived = expected, dict.fromkeys(expected, 0)

    def rows(self, name: str, parts: int, size: int, like: Tensor) -> Tensor:
        """Return uninitialised memory [parts, samples, size] for a block, in its final place where possible."""
        start, stop = self._range
        held = self.held.get(name)
        fits = held is None or held.rows.shape == (parts, self.b, size)
        if self._drop or self.k > 1 or self._arrived[name] or not fits:
            return like.new_empty(parts, stop - start, size)
        return self._buffers.get(("J", name), (parts, self.b, size), like)[:, start:stop]

    def add_block(self, name: str, block: Block) -> None:
        """Add per-sample gradients; once the last expected block has arrived, its product is added to G."""
        held = self.held.get(name)
        start, stop = self._range
        first = not self._arrived[name]
        whole = self.k == 1 and stop - start == self.b
        parts, _, size = block.rows.shape
        if held is None:
            if whole:
                held = Held(block.rows, block.layout, own=False)
            else:
                rows = self._buffers.get(("J", name), (parts, self.b, self.k, size), block.rows)
                # Ranges of samples in which the parameter is not used have no block.
                rows[:, :start].zero_()
                rows[:, stop:].zero_()
                held = Held(rows.view(parts, self.b * self.k, size), block.layout, own=True)
            self.held[name] = held
        if held.rows is not block.rows:
            self._put(held, block, first)
        self._arrived[name] += 1
        done = stop == self.b and self._j == self.k - 1 and self._arrived[name] == self._expected[name]
        if done and parts * size > SMALL and name not in self._factored:
            self._multiply(name)

    def add_factors(self, key: str, factors: Factors) -> None:
        """Add the factors of one residual, with D [b, 1, T, F], of the layer called `key`."""
        several = self._parts.setdefault(key, [])
        self._factored.update(factors.names())
        if self.k == 1:
            several.append((self._range[0], factors))
            return
        if self._j == 0:
            D = factors.D
            factors.D = D.new_empty(len(D), self.k, *D.shape[2:])
            factors.D[:, 0] = D[:, 0]
            several.append((self._range[0], factors))
        else:
            several[-1][1].D[:, self._j] = factors.D[:, 0]

    def finish(self) -> None:
        """Multiply the rest (factors, small blocks, parameters with missing blocks) and symmetrise G."""
        self._write_out_factors()
        rest = [name for name in self.held if name not in self._multiplied]
        small = [name for name in rest if self.trained.params[name].numel() <= SMALL]
        for name in rest:
            if name not in small:
                self._multiply(name)
        for name in small:
            self._watch(name)
        for group in range(self.trained.num_groups):
            names = [name for name in small if self._group[name] == group]
            if names:
                blocks = self._concatenated(names)
                self.grams.add_rows(names, blocks.layouts, blocks.rows)
                if self.comparison is not None:
                    self.comparison.pulled |= blocks.pulled(self.comparison.weights.flatten(), self.products)
                if not self._drop:
                    self.small.append(blocks)
        with full_precision_products(), span("gramgn.gram"):
            for key, parts in self._parts.items():
                factors = self.factors[key] = joined([part for _, part in parts])
                self._multiply_factors(factors)
                bounds = factors.bounds() if self.watched else {}
                self.norms |= {name: bounds[name] for name in bounds if name in self.watched}
                if self.comparison is not None:
                    pulled = {name: torch.zeros_like(self.trained.params[name]) for name in factors.names()}
                    w = weighted(factors, self.comparison.weights)
                    factors.add_vjp_(pulled, w, dict.fromkeys(pulled, 1.0), self.products)
                    self.comparison.pulled |= pulled
        self._parts.clear()
        self.G = self.grams.finish()

    def _write_out_factors(self) -> None:
        """Turn factors into rows where some ranges of samples have none, or rows in their place."""
        for key, parts in list(self._parts.items()):
            names = {name for _, part in parts for name in part.names()}
            if sum(len(part.D) for _, part in parts) == self.b and names.isdisjoint(self.held):
                continue
            del self._parts[key]
            for start, part in parts:
                for name in part.names():
                    shape = tuple(self.trained.params[name].shape)
                    written = part.D.new_empty(len(part.D) * self.k, math.prod(shape))
                    part.write_rows_(name, written)
                    layout = part.layout if isinstance(part, LinearFactors) and name == part.weight else None
                    block = Block(written[None], layout or Layout(shape, tuple(range(len(shape)))))
                    held = self.held.get(name)
                    if held is None:
                        rows = written.new_zeros(1, self.b * self.k, written.shape[1])
                        held = self.held[name] = Held(rows, block.layout, own=True)
                    rows = block.rows if block.layout == held.layout else block.relaid(held.layout)
                    target = held.rows.view(len(held.rows), self.b, self.k, -1)
                    target = target[:, start : start + len(part.D)]
                    target += _split_like(rows, held.rows).view_as(target)

    def _multiply_factors(self, factors: Factors) -> None:
        if len({self._group[name] for name in factors.names()}) == 1:
            self.grams.add_factors(factors)
            return
        assert isinstance(factors, LinearFactors)
        for weight, bias in ((factors.weight, None), (None, factors.bias)):
            self.grams.add_factors(replace(factors, weight=weight, bias=bias))

    def _put(self, held: Held, block: Block, first: bool) -> None:
        """Copy a block into the held rows, or add it to them."""
        rows = block.rows if block.layout == held.layout else block.relaid(held.layout)
        if not held.own and not first:
            # Never in place: the block of a bias may be the very gradient that autograd still propagates.
            held.rows = held.rows + _split_like(rows, held.rows)
            return
        start, stop = self._range
        parts, _, size = held.rows.shape
        rows = _split_like(rows, held.rows)
        target = held.rows.view(parts, self.b, self.k, size)[:, start:stop, self._j]
        if not first:
            target.add_(rows)
        elif target.data_ptr() != rows.data_ptr():
            target.copy_(rows)

    def _watch(self, name: str) -> None:
        if name in self.watched:
            self.norms[name] = torch.linalg.vector_norm(self.held[name].rows)

    def _multiply(self, name: str) -> None:
        self._watch(name)
        with span("gramgn.gram"):
            held = self.held[name]
            self.grams.add_rows([name], [held.layout], held.rows)
            if self.comparison is not None:
                pulled = self.products.vector_times_rows(
                    self.comparison.weights.flatten(), held.rows
                ).flatten()
                self.comparison.pulled[name] = held.layout.to_param(pulled)
        self._multiplied.add(name)
        if self._drop:
            del self.held[name]

    def _concatenated(self, names: list[str]) -> SmallBlocks:
        held = [self.held.pop(name) for name in names]
        n = self.b * self.k
        rows = [
            block.rows[0] if len(block.rows) == 1 else block.rows.transpose(0, 1).reshape(n, -1)
            for block in held
        ]
        return SmallBlocks(
            names,
            [row.shape[1] for row in rows],
            [block.layout for block in held],
            torch.cat(rows, dim=1)[None],
        )


def _split_like(rows: Tensor, held: Tensor) -> Tensor:
    """Return rows with the same order of entries as the held ones, split into as many parts."""
    parts, _, size = held.shape
    return rows.transpose(0, 1).reshape(-1, parts, size).transpose(0, 1)


def rows_times_vector(rows: Tensor, d: Tensor) -> Tensor:
    """Return the sum over parts of rows d for rows [parts, n, size] and d [parts, size], as [n] in float64."""
    dtype = product_dtype(rows.dtype)
    return to_float64(torch.bmm(rows.to(dtype), d.to(dtype).unsqueeze(2))).sum(dim=(0, 2))


def to_float64(matrix: Tensor) -> Tensor:
    """Return a tensor in float64, on a device that supports it."""
    return matrix.to(float64_home(matrix.device)).to(torch.float64)
