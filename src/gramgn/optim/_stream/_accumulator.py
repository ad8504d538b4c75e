"""J and G, put together as the layers' blocks arrive.

b samples, k residuals per sample; rows (sample, residual).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.optim._stream._blocks import Block, Layout
from gramgn.optim._stream._buffers import Buffers
from gramgn.optim._stream._factors import Factors, LinearFactors, joined, weighted
from gramgn.optim._stream._verification import Comparison
from gramgn.optim.closure import Trained
from gramgn.optim.runtime import float64_home, full_precision_products, product_dtype, span

SMALL = 64
"""Blocks of at most so many columns are multiplied together."""

LARGE, MANY_ROWS = 10_000_000, 256
"""Multiply-adds of a product that takes several threads by itself, and rows from which halves pay on a CPU: as
timed on two cores."""


@dataclass
class Held:
    """The block of one parameter, as far as it has arrived.

    Attributes:
        rows: [parts, b k, size], or [parts, b, size] of one residual that is all there is.
        layout: Where the entries belong.
        own: Whether the memory is the accumulator's, to be added to.
    """

    rows: Tensor
    layout: Layout
    own: bool


@dataclass(frozen=True)
class SmallBlocks:
    """Blocks of few columns side by side.

    Attributes:
        names: The parameters.
        sizes: The number of columns of each.
        layouts: Where their entries belong.
        rows: [1, b k, all columns].
    """

    names: list[str]
    sizes: list[int]
    layouts: list[Layout]
    rows: Tensor

    def pulled(self, u: Tensor) -> dict[str, Tensor]:
        """Return the parts of J^T u in the parameters' shapes by name."""
        columns = _times_rows(u, self.rows)[0].split(self.sizes)
        return {
            name: layout.to_param(column)
            for name, layout, column in zip(self.names, self.layouts, columns, strict=True)
        }


class Accumulator:
    """Takes per-sample gradients in any order; a parameter's blocks are summed before they are multiplied.

    Args:
        trained: The trained parameters.
        num_samples: b.
        num_residuals: k.
        buffers: Memory for the blocks.
        drop: Let each block go once it is multiplied.
        comparison: Told of J^T w, where that is to be compared.
    """

    def __init__(
        self,
        trained: Trained,
        num_samples: int,
        num_residuals: int,
        buffers: Buffers,
        *,
        drop: bool = False,
        comparison: Comparison | None = None,
    ) -> None:
        self.comparison = comparison
        self.trained = trained
        self.b, self.k = num_samples, num_residuals
        self.held: dict[str, Held] = {}
        self.small: list[SmallBlocks] = []
        self.factors: dict[str, Factors] = {}
        self._parts: dict[str, list[Factors]] = {}
        self._buffers, self._drop = buffers, drop
        self._group = dict(zip(trained.params, trained.groups, strict=True))
        self._multiplied: set[str] = set()
        self._range, self._j = (0, num_samples), 0
        self._expected: Mapping[str, int] = {}
        self._arrived: dict[str, int] = {}
        device = next(iter(trained.params.values())).device
        n = num_samples * num_residuals
        self.G = torch.zeros(trained.num_groups, n, n, dtype=torch.float64, device=float64_home(device))
        self._G = list(self.G)

    def begin(self, start: int, stop: int, j: int, expected: Mapping[str, int]) -> None:
        """Say what comes next: residual j of a range of samples.

        Args:
            start: The first sample.
            stop: The sample after the last.
            j: The residual.
            expected: How many blocks will come for each parameter.
        """
        self._range, self._j = (start, stop), j
        self._expected, self._arrived = expected, dict.fromkeys(expected, 0)

    def rows(self, name: str, parts: int, size: int, like: Tensor) -> Tensor:
        """Return uninitialised memory [parts, samples, size] for a block, where it will stay if it can."""
        start, stop = self._range
        held = self.held.get(name)
        fits = held is None or held.rows.shape == (parts, self.b, size)
        if self._drop or self.k > 1 or self._arrived[name] or not fits:
            return like.new_empty(parts, stop - start, size)
        return self._buffers.get(("J", name), (parts, self.b, size), like)[:, start:stop]

    def add_block(self, name: str, block: Block) -> None:
        """Add per-sample gradients; the last ones expected are multiplied at once."""
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
                held = Held(rows.view(parts, self.b * self.k, size), block.layout, own=True)
            self.held[name] = held
        if held.rows is not block.rows:
            self._put(held, block, first)
        self._arrived[name] += 1
        done = stop == self.b and self._j == self.k - 1 and self._arrived[name] == self._expected[name]
        if done and parts * size > SMALL:
            self._multiply(name)

    def add_factors(self, key: str, factors: Factors) -> None:
        """Add the factors of one residual, D [b, 1, T, F], of the layer called ``key``."""
        several = self._parts.setdefault(key, [])
        if self.k == 1:
            several.append(factors)
            return
        if self._j == 0:
            D = factors.D
            factors.D = D.new_empty(len(D), self.k, *D.shape[2:])
            factors.D[:, 0] = D[:, 0]
            several.append(factors)
        else:
            several[-1].D[:, self._j] = factors.D[:, 0]

    def finish(self) -> None:
        """Multiply what has not been: factors, small blocks, those of which fewer came than expected."""
        rest = [name for name in self.held if name not in self._multiplied]
        small = [name for name in rest if self.trained.params[name].numel() <= SMALL]
        for name in rest:
            if name not in small:
                self._multiply(name)
        for group, G in enumerate(self._G):
            names = [name for name in small if self._group[name] == group]
            if names:
                blocks = self._joined(names)
                G += gram_of(blocks.rows)
                if self.comparison is not None:
                    self.comparison.pulled |= blocks.pulled(self.comparison.weights.flatten())
                if not self._drop:
                    self.small.append(blocks)
        with full_precision_products(), span("gramgn.gram"):
            for key, parts in self._parts.items():
                factors = self.factors[key] = joined(parts)
                names = [name for name in (factors.weight, getattr(factors, "bias", None)) if name]
                self._add_factored_gram(factors, names)
                if self.comparison is not None:
                    pulled = {name: torch.zeros_like(self.trained.params[name]) for name in names}
                    w = weighted(factors, self.comparison.weights)
                    factors.add_vjp_(pulled, w, dict.fromkeys(names, 1.0))
                    self.comparison.pulled |= pulled
        self._parts.clear()
        if self.comparison is not None:
            self.comparison.compare()

    def _add_factored_gram(self, factors: Factors, names: list[str]) -> None:
        groups = {self._group[name] for name in names}
        if len(groups) == 1:
            self._G[groups.pop()] += _float64(factors.gram())
            return
        assert isinstance(factors, LinearFactors)
        for weight, bias in ((factors.weight, None), (None, factors.bias)):
            part = LinearFactors(factors.A, factors.D, weight, bias)
            self._G[self._group[weight or bias or ""]] += _float64(part.gram())

    def _put(self, held: Held, block: Block, first: bool) -> None:
        """Copy or add a block into what is held."""
        rows = block.rows if block.layout == held.layout else block.relaid(held.layout)
        if not held.own and not first:
            # Never in place: a bias's block may be the very gradient that autograd goes on with.
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

    def _multiply(self, name: str) -> None:
        with span("gramgn.gram"):
            held = self.held[name]
            self._G[self._group[name]] += gram_of(held.rows)
            if self.comparison is not None:
                pulled = _times_rows(self.comparison.weights.flatten(), held.rows).flatten()
                self.comparison.pulled[name] = held.layout.to_param(pulled)
        self._multiplied.add(name)
        if self._drop:
            del self.held[name]

    def _joined(self, names: list[str]) -> SmallBlocks:
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


@dataclass(frozen=True)
class HeldJacobian:
    """J by layer, as blocks or as factors."""

    accumulated: Accumulator

    def gram(self) -> Tensor:
        """Return G by group, [groups, b k, b k] in float64."""
        return self.accumulated.G

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return J d [b k] in float64 for d by name."""
        parts = self.accumulated
        product = parts.G.new_zeros(parts.b * parts.k)
        with full_precision_products():
            for factors in parts.factors.values():
                product += _float64(factors.jvp(direction)).flatten()
            for name, held in parts.held.items():
                d = held.layout.from_param(direction[name]).view(len(held.rows), -1)
                product += _rows_times(held.rows, d)
            for blocks in parts.small:
                d = torch.cat(
                    [
                        layout.from_param(direction[name])
                        for name, layout in zip(blocks.names, blocks.layouts, strict=True)
                    ]
                )
                product += _rows_times(blocks.rows, d[None])
        return product

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u, times the scales, to tensors by name."""
        parts = self.accumulated
        with full_precision_products():
            # Everything that takes memory comes before the first parameter is changed.
            of_factors = [(each, weighted(each, u.view(parts.b, parts.k))) for each in parts.factors.values()]
            pulled: dict[str, Tensor] = {}
            for name, held in parts.held.items():
                pulled[name] = held.layout.to_param(_times_rows(u, held.rows).flatten())
            for blocks in parts.small:
                pulled |= blocks.pulled(u)
            for factors, D in of_factors:
                factors.add_vjp_(out, D, scales)
        by_scale: dict[float, list[str]] = {}
        for name in pulled:
            by_scale.setdefault(scales[name], []).append(name)
        for scale, names in by_scale.items():
            torch._foreach_add_([out[name] for name in names], [pulled[name] for name in names], alpha=scale)


def _split_like(rows: Tensor, held: Tensor) -> Tensor:
    """Return rows, whose entries lie in the order of those held, in as many parts."""
    parts, _, size = held.shape
    return rows.transpose(0, 1).reshape(-1, parts, size).transpose(0, 1)


def gram_of(rows: Tensor) -> Tensor:
    """Return the sum over parts of rows rows^T for [parts, n, size], in float64.

    On a CPU large products go part by part and, for many rows, by halves: what is above the diagonal is below it
    too. Small ones go together, in several pieces of the columns: one alone wakes the threads for too little work.
    """
    rows = rows.to(product_dtype(rows.dtype))
    parts, n, size = rows.shape
    with full_precision_products():
        if rows.device.type == "cpu" and n * n * size >= LARGE:
            G = torch.zeros(n, n, dtype=torch.float64)
            for part in rows:
                _add_symmetric_(G, part)
            return G
        if parts == 1:
            pieces = next((pieces for pieces in (4, 3, 2, 5, 7) if size % pieces == 0), 1)
            rows = rows.view(n, pieces, size // pieces).transpose(0, 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
    return products.to(float64_home(products.device)).sum(dim=0, dtype=torch.float64)


def _add_symmetric_(G: Tensor, rows: Tensor) -> None:
    """Add rows rows^T to G, forming one of the blocks beside the diagonal where there are many rows."""
    n = len(rows)
    if n < MANY_ROWS:
        G += torch.mm(rows, rows.T)
        return
    upper, lower = slice(0, n // 2), slice(n // 2, n)
    beside = torch.mm(rows[upper], rows[lower].T)
    G[upper, lower] += beside
    G[lower, upper] += beside.T
    for half in (upper, lower):
        _add_symmetric_(G[half, half], rows[half])


def _rows_times(rows: Tensor, d: Tensor) -> Tensor:
    """Return the sum over parts of rows d for [parts, n, size] and [parts, size], in float64."""
    dtype = product_dtype(rows.dtype)
    return _float64(torch.bmm(rows.to(dtype), d.to(dtype).unsqueeze(2))).sum(dim=(0, 2))


def _times_rows(u: Tensor, rows: Tensor) -> Tensor:
    """Return u rows [parts, size]."""
    dtype = product_dtype(rows.dtype)
    u = u.to(rows.device, dtype).expand(len(rows), 1, -1)
    return torch.bmm(u, rows.to(dtype)).squeeze(1)


def _float64(matrix: Tensor) -> Tensor:
    return matrix.to(float64_home(matrix.device)).to(torch.float64)
