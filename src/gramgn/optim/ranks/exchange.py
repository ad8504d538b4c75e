"""G = J J^T from the rows of all ranks: an all-to-all turns each rank's rows into all rows of some columns.

Each rank multiplies the columns that it received, and the products are summed on rank 0. Where a layer is held as
factors, all of them go to one rank. What is exchanged in which order is a plan, which the ranks agree on when a network
is run in a new way; from then on each part is sent while the backward pass goes on, as soon as it is complete.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gramgn.optim.closure import Trained
from gramgn.optim.ranks.group import Ranks
from gramgn.optim.runtime import full_precision_products, product_dtype, span, zero_gram
from gramgn.optim.stream.accumulate import GramSum
from gramgn.optim.stream.blocks import FLAT, Block, EmbeddingFactors, Factors, Layout, LinearFactors
from gramgn.optim.stream.products import Products

BUCKET_BYTES = 8 * 2**20
"""Parameters are sent together until a rank sends this much."""
IN_FLIGHT = 2
"""The number of exchanges that are under way at a time."""
MOST_PLANS = 1000
"""The number of plans that are remembered; then all are forgotten and agreed on again."""
TILE = 32
"""G is sent as the lower triangle of tiles of this number of rows."""


@dataclass(frozen=True)
class Piece:
    """What is sent in one piece: the rows of a parameter, or the factors of a layer.

    Attributes:
        names: The parameters.
        layout: The order of the columns, or that of the weight's; None: the parameter's own.
        A: The shape of a sample's inputs (T, in), or tokens (T,); empty: rows.
        D: The shape of a sample's output gradients (k, T, F).
        weight: The name of the weight, where it is trained.
        bias: That of the bias.
    """

    names: tuple[str, ...]
    layout: Layout | None
    A: tuple[int, ...] = ()
    D: tuple[int, ...] = ()
    weight: str | None = None
    bias: str | None = None

    @classmethod
    def of(cls, factors: Factors) -> Piece:
        """Return the description of factors."""
        names, D = tuple(factors.names()), tuple(factors.D.shape[1:])
        if isinstance(factors, EmbeddingFactors):
            return cls(names, None, tuple(factors.tokens.shape[1:]), D, factors.weight)
        return cls(names, factors.layout, tuple(factors.A.shape[1:]), D, factors.weight, factors.bias)

    def merged(self, other: Piece) -> Piece | None:
        """Return what holds both of two descriptions of the same names, or None where nothing does."""
        if not self.A and not other.A:
            return self if self == other else replace(self, layout=None)
        if not (self.A and other.A):
            return None
        places = max(self.A[0], other.A[0])
        first, second = (
            replace(part, A=(places, *part.A[1:]), D=(part.D[0], places, *part.D[2:]))
            for part in (self, other)
        )
        return first if first == second else None


@dataclass(frozen=True)
class Bucket:
    """Parts that are sent together, as a matrix [b_r, width] of each rank for factors, else [n_r, width].

    Attributes:
        parts: Rows of parameters of one group, or the factors of one layer.
        bounds: Rank t gets the columns bounds[t] to bounds[t + 1].
    """

    parts: tuple[Piece, ...]
    bounds: tuple[int, ...]

    @property
    def of_factors(self) -> bool:
        """Whether it consists of factors."""
        return bool(self.parts[0].A)


class Rehearsal(GramSum):
    """Notes which blocks there are, in which order, and keeps none."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.order: list[Piece] = []

    def add_rows(self, names: Sequence[str], layouts: Sequence[Layout], rows: Tensor) -> None:
        """Note the rows of parameters."""
        self.order += [Piece((name,), layout) for name, layout in zip(names, layouts, strict=True)]

    def add_factors(self, factors: Factors) -> None:
        """Note factors."""
        self.order.append(Piece.of(factors))

    def finish(self) -> Tensor:
        """Return nothing in place of G."""
        return torch.empty(0)


class Exchange(GramSum):
    """Takes the blocks of this rank's rows as they become complete, and returns G of all rows on rank 0.

    Args:
        ranks: The ranks.
        trained: The trained parameters.
        products: Multiplies the blocks.
        identity: Numbers that must be the same on all ranks: of the settings, of the parameters, of the terms, if any.
        drop: Whether blocks are to be released once they were sent.

    Attributes:
        begun: Whether the ranks have agreed on this step.
        settled: Whether an error was raised on all ranks.
        samples: The number of samples of each rank.
        rows: The number of rows of each rank.
        on_terms: Whether the step is on terms.
    """

    def __init__(
        self,
        ranks: Ranks,
        trained: Trained,
        products: Products,
        identity: Sequence[int],
        *,
        drop: bool,
    ) -> None:
        self.ranks, self.trained, self.products, self.identity = ranks, trained, products, identity
        self.drop, self.begun, self.settled = drop, False, False
        self.dtype = product_dtype(reduce(torch.promote_types, (p.dtype for p in trained.params.values())))
        self.group = dict(zip(trained.params, trained.groups, strict=True))
        self.plan: tuple[Piece, ...] | None = None
        self._buckets: list[Bucket] = []
        self._next = 0  # the number of buckets that were sent
        self._blocks: dict[str, Block] = {}
        self._factors: dict[tuple[str, ...], Factors] = {}
        self._order: list[Piece] = []  # what has arrived
        self._rehearsed: Rehearsal | None = None
        self._failed = False
        self._under_way: deque[tuple[Any, Bucket, Tensor, Tensor]] = deque()

    def begin(
        self, num_samples: int, num_rows: int, way: Hashable, error: BaseException | None = None
    ) -> Exchange:
        """Agree with the other ranks on the step, before anything is sent.

        Args:
            num_samples: b_r.
            num_rows: n_r.
            way: Identifies how the network was run on this rank.
            error: What kept this rank from it.

        Raises:
            ValueError: The ranks do not fit together; on all of them. So is the error of any rank.
        """
        self.begun = self.settled = True
        self._way = way
        own = [error is not None, num_samples, num_rows, self.ranks.seen.get(way, 0), *self.identity]
        failed, samples, rows, plans, *identities = zip(*self.ranks.gather(own, torch.int64), strict=True)
        self.ranks.raise_together(failed, error)
        self.samples, self.rows, self.on_terms = list(samples), list(rows), any(identities[2])
        _check_alike(self.samples, self.rows, *identities)
        self.num_samples = sum(samples)
        known = {plan for plan, b in zip(plans, samples, strict=True) if b}
        self.settled = False
        if len(known) == 1 and (identity := known.pop()) in self.ranks.plans:
            b, plan = self.ranks.plans[identity]
            if b == self.num_samples:
                self._adopt(plan)
        if self.drop and self.plan is None:
            self._rehearsed = Rehearsal(self.num_samples)
        self.G = zero_gram(self.trained.num_groups, sum(rows), self.ranks.device)
        return self

    @property
    def rehearsal(self) -> Rehearsal | None:  # type: ignore[override]
        """What is to see the blocks first, where they are dropped and there is no plan."""
        return self._rehearsed

    def add_rows(self, names: Sequence[str], layouts: Sequence[Layout], rows: Tensor) -> None:
        """Add the rows [parts, n_r, size] of parameters of one group."""
        sizes = [self.trained.params[name].numel() for name in names]
        several = rows.split(sizes, dim=2) if len(names) > 1 else [rows]
        for name, layout, block in zip(names, layouts, several, strict=True):
            self._blocks[name] = Block(block, layout)
            self._order.append(Piece((name,), layout))
        self._advance()

    def add_factors(self, factors: Factors) -> None:
        """Add the factors of parameters of one group."""
        part = Piece.of(factors)
        self._factors[part.names] = factors
        self._order.append(part)
        self._advance()

    def finish(self) -> Tensor:
        """Return nothing in place of G, which is known once all ranks have finished."""
        return torch.empty(self.trained.num_groups, 0, 0, dtype=torch.float64, device=self.ranks.device)

    def norm(self) -> float:
        """Return the Frobenius norm of this rank's rows, or a bound where there are factors."""
        squares = [torch.linalg.vector_norm(block.rows).square() for block in self._blocks.values()]
        squares += [bound.square() for each in self._factors.values() for bound in each.bounds().values()]
        return math.sqrt(float(torch.stack([square.double() for square in squares]).sum()))

    def fits(self) -> bool:
        """Return whether the plan has a place for everything that arrived."""
        if self.plan is None:
            return False
        of_rows = {part.names[0] for part in self.plan if not part.A}
        planned = {part.names: part for part in self.plan if part.A}
        return all(
            of_rows.issuperset(part.names)
            or (part.names in planned and planned[part.names].merged(part) == planned[part.names])
            for part in self._order
        )

    def send_rest(self, *, failed: bool = False) -> None:
        """Send what was not sent, zeros for what did not arrive, and wait until G is complete.

        `failed`: this rank raised an error, so that its part of G does not matter.
        """
        self._failed = failed
        while self._next < len(self._buckets):
            self._send()
        while self._under_way:
            self._receive()

    def agree(self) -> None:
        """Agree on a plan for what has arrived on all ranks, and start again with it."""
        seen = self._order or (self._rehearsed.order if self._rehearsed else [])
        given = [order for order in self.ranks.gather_objects(seen) if order]
        plan = _joint_plan(given)
        identity = int.from_bytes(hashlib.sha256(repr((self.num_samples, plan)).encode()).digest()[:7], "big")
        if len(self.ranks.plans) >= MOST_PLANS:
            self.ranks.plans.clear()
        self.ranks.plans[identity] = (self.num_samples, plan)
        if self.samples[self.ranks.rank]:
            if len(self.ranks.seen) >= MOST_PLANS:
                self.ranks.seen.clear()
            self.ranks.seen[self._way] = identity
        self.G.zero_()
        self._adopt(plan)

    def reduced(self) -> Tensor:
        """Return G by group on rank 0, exactly symmetric; without rows on the others."""
        n, me = sum(self.rows), self.ranks.rank
        tiles = [(start, min(start + TILE, n)) for start in range(0, n, TILE)]
        with torch.no_grad():
            # From the order in which rows were received, this rank's last, to that of the ranks.
            before, after = sum(self.rows[:me]), sum(self.rows[me + 1 :])
            first, second, own = torch.arange(n).split([before, after, self.rows[me]])
            order = torch.cat([first, own, second])
            self.G = self.G[:, order][:, :, order]
            lower = torch.cat([self.G[:, start:stop, :stop].flatten() for start, stop in tiles])
            self.ranks.sum_on_first_(lower)
            if not self.ranks.leads:
                return self.finish()
            sizes = [len(self.G) * (stop - start) * stop for start, stop in tiles]
            for (start, stop), tile in zip(tiles, lower.split(sizes), strict=True):
                self.G[:, start:stop, :stop] = tile.view(len(self.G), stop - start, stop)
            return self.G.tril() + self.G.tril(-1).mT

    def _adopt(self, plan: tuple[Piece, ...]) -> None:
        self.plan, self._next = plan, 0
        self._buckets = self._in_buckets(plan)

    def _in_buckets(self, plan: Sequence[Piece]) -> list[Bucket]:
        """Return parts in the order in which they are sent."""
        R, itemsize = self.ranks.size, self.dtype.itemsize
        buckets: list[Bucket] = []
        waiting: list[Piece] = []
        load = [0] * R
        most = max(self.rows) * itemsize

        def close() -> None:
            width = sum(self._width(part) for part in waiting)
            if waiting:
                buckets.append(Bucket(tuple(waiting), tuple(width * t // R for t in range(R + 1))))
            waiting.clear()

        for part in plan:
            if part.A:
                # To the rank that has had the least to multiply.
                owner = min(range(R), key=load.__getitem__)
                load[owner] += self._width(part)
                buckets.append(
                    Bucket((part,), tuple(0 if t <= owner else self._width(part) for t in range(R + 1)))
                )
                continue
            if waiting and (
                self.group[waiting[0].names[0]] != self.group[part.names[0]]
                or sum(self._width(each) for each in waiting) * most >= BUCKET_BYTES
            ):
                close()
            waiting.append(part)
        close()
        return buckets

    def _width(self, part: Piece) -> int:
        """Return the numbers per row, or per sample for factors."""
        if not part.A:
            return self.trained.params[part.names[0]].numel()
        of_tokens = len(part.A) == 1
        return math.prod(part.A) * (8 // self.dtype.itemsize if of_tokens else 1) + math.prod(part.D)

    def _advance(self) -> None:
        """Send the buckets whose parts are all there, in the order of the plan."""
        while self._next < len(self._buckets) and all(map(self._is_there, self._buckets[self._next].parts)):
            self._send()

    def _is_there(self, part: Piece) -> bool:
        return part.names in self._factors if part.A else part.names[0] in self._blocks

    @torch.no_grad()
    def _send(self) -> None:
        """Start to exchange the next bucket; another one that is under way is received first."""
        if len(self._under_way) >= IN_FLIGHT:
            self._receive()
        bucket, me = self._buckets[self._next], self.ranks.rank
        heights, bounds = self.samples if bucket.of_factors else self.rows, bucket.bounds
        widths = [stop - start for start, stop in pairwise(bounds)]
        to_each = [0 if t == me else heights[me] * width for t, width in enumerate(widths)]
        from_each = [0 if t == me else height * widths[me] for t, height in enumerate(heights)]
        # What this rank keeps lies behind what it receives; see `reduced`.
        sent, received = (
            torch.empty(size, dtype=self.dtype, device=self.ranks.device)
            for size in (sum(to_each), sum(heights) * widths[me])
        )
        others, own = received.split([sum(from_each), heights[me] * widths[me]])
        if self._failed:
            sent.zero_()
        elif heights[me]:
            places = [
                (own if t == me else place).view(heights[me], widths[t])
                for t, place in enumerate(sent.split(to_each))
            ]
            column = 0
            for part in bucket.parts:
                for matrix in self._matrices(part):
                    _put(places, bounds, column, matrix)
                    column += matrix.shape[1]
                if self.drop:
                    self._blocks.pop(part.names[0], None)
        work = self.ranks.exchange(others, sent, from_each, to_each)
        self._next += 1
        self._under_way.append((work, bucket, received, sent))

    def _matrices(self, part: Piece) -> list[Tensor]:
        """Return what this rank sends of a part, as matrices that lie next to each other."""
        own = self._factors.get(part.names)
        if part.A:
            if own is None:
                return [self._zeros(self.samples, part)]
            return [each.flatten(1) for each in self._in_places(own, part)]
        (name,) = part.names
        block = self._blocks.get(name) or self._written_out(name)
        if block is None:
            return [self._zeros(self.rows, part)]
        if block.layout == part.layout:
            return list(block.rows)
        return [_relaid(block, part.layout, self.trained.params[name].shape)]

    def _zeros(self, heights: Sequence[int], part: Piece) -> Tensor:
        shape = heights[self.ranks.rank], self._width(part)
        return torch.zeros(shape, dtype=self.dtype, device=self.ranks.device)

    def _in_places(self, factors: Factors, part: Piece) -> tuple[Tensor, Tensor]:
        """Return A and D with as many places as in the plan; tokens as the bits of floating point numbers."""
        missing, D = part.A[0] - factors.D.shape[2], factors.D.to(self.dtype)
        if isinstance(factors, EmbeddingFactors):
            A = torch.nn.functional.pad(factors.tokens, (0, missing)).contiguous().view(self.dtype)
        else:
            A = torch.nn.functional.pad(factors.A.to(self.dtype), (0, 0, 0, missing))
        return A, torch.nn.functional.pad(D, (0, 0, 0, missing))

    def _written_out(self, name: str) -> Block | None:
        """Return the rows of a parameter that this rank holds as factors."""
        for names, factors in self._factors.items():
            if name in names:
                rows = factors.D.new_empty(
                    factors.D.shape[0] * factors.D.shape[1], self.trained.params[name].numel()
                )
                factors.write_rows_(name, rows)
                own = isinstance(factors, LinearFactors) and name == factors.weight
                layout = factors.layout if own and isinstance(factors, LinearFactors) else None
                return Block(rows[None], layout or FLAT)
        return None

    @torch.no_grad()
    def _receive(self) -> None:
        """Wait for the oldest bucket that is under way, and add its product to G."""
        work, bucket, received, _ = self._under_way.popleft()
        self.ranks.wait(work)
        if self._failed or not received.numel():
            return
        part = bucket.parts[0]
        G = self.G[self.group[part.names[0]]]
        device = next(iter(self.trained.params.values())).device
        with torch.autocast(device.type, enabled=False), full_precision_products(), span("gramgn.gram"):
            if not bucket.of_factors:
                G.add_(self.products.gram(received.view(1, sum(self.rows), -1)))
                return
            size = self._width(part) - math.prod(part.D)
            A, D = received.view(self.num_samples, -1).split([size, math.prod(part.D)], dim=1)
            D = D.reshape(-1, *part.D)
            factors: Factors
            if len(part.A) == 1:
                factors = EmbeddingFactors(A.contiguous().view(torch.int64), D, part.weight or "")
            else:
                factors = LinearFactors(A.reshape(-1, *part.A), D, part.weight, part.bias)
            G.add_(factors.gram(self.products).to(G.device))


def fail_together(ranks: Ranks, error: BaseException | None) -> None:
    """Raise on all ranks the error that kept this one from a step."""
    failed = [bool(row[0]) for row in ranks.gather([1, 0, 0, 0, 0, 0, 0], torch.int64)]
    ranks.raise_together(failed, error)


def _joint_plan(orders: Sequence[Sequence[Piece]]) -> tuple[Piece, ...]:
    """Return what holds the parts of all ranks, in the order of the first."""
    found: dict[tuple[str, ...], Piece | None] = {}
    holders: dict[str, set[tuple[str, ...]]] = {}
    for order in orders:
        for part in order:
            before = found.get(part.names, part)
            found[part.names] = None if before is None else before.merged(part)
            for name in part.names:
                holders.setdefault(name, set()).add(part.names)
    # Where ranks hold a parameter in different ways, it goes as rows in its own order.
    apart = {names for names, part in found.items() if part is None}
    while more := {key for keys in holders.values() if len(keys) > 1 or keys & apart for key in keys} - apart:
        apart |= more
    plan: dict[tuple[str, ...], Piece] = {}
    for names, found_part in found.items():
        if names not in apart and found_part is not None:
            plan[names] = found_part
        else:
            plan |= {(name,): Piece((name,), None) for name in names}
    return tuple(plan.values())


def _check_alike(samples: Sequence[int], rows: Sequence[int], *identities: Sequence[int]) -> None:
    """Reject ranks that do not fit together; each of them sees the same numbers."""
    what = (
        "another network, other trained parameters, parameter groups, hyper-parameters or options",
        "other values of the parameters",
        "other terms, by their number, names or weights,",
    )
    seen = [rank for rank, b in enumerate(samples) if b]
    for kind, numbers in zip(what, identities, strict=True):
        # A rank without samples has no terms.
        ranks = seen if kind == what[2] else range(len(samples))
        other = next((rank for rank in ranks if numbers[rank] != numbers[ranks[0]]), None)
        if other is not None:
            raise ValueError(
                f"rank {other} has {kind} than rank {ranks[0]}, so they cannot take one step together: build, load and "
                "change networks and optimizers alike on all ranks"
            )
    if not seen:
        raise ValueError(
            f"none of the {len(samples)} ranks has a sample in this step: leave it out on all of them"
        )
    of_terms = identities[2][seen[0]] > 0
    if not of_terms and any(rows[rank] * samples[seen[0]] != rows[seen[0]] * samples[rank] for rank in seen):
        raise ValueError(
            f"the ranks have different numbers of residuals per sample: {list(rows)} for {list(samples)} samples. "
            "Ranks that run their samples in chunks count the outputs: where memory_budget divides those of some ranks "
            "only, set chunk_size on all"
        )


def _put(places: Sequence[Tensor], bounds: Sequence[int], column: int, matrix: Tensor) -> None:
    """Copy a matrix whose first column has the number `column` to the places of the ranks that get its columns."""
    end = column + matrix.shape[1]
    for t, place in enumerate(places):
        start, stop = max(column, bounds[t]), min(end, bounds[t + 1])
        if start < stop:
            place[:, start - bounds[t] : stop - bounds[t]] = matrix[:, start - column : stop - column]


def _relaid(block: Block, layout: Layout | None, shape: torch.Size) -> Tensor:
    """Return the rows of a block in another layout, [n, size]; None: the order of the parameter, of this shape."""
    n = block.rows.shape[1]
    given = block.layout
    laid = block.rows.transpose(0, 1).reshape(n, *(given.sizes or (1,)))
    own = laid.permute(0, *(i + 1 for i in given.order or (0,))).reshape(n, *shape)
    if layout is None or not layout.order:
        return own.flatten(1) if own.ndim > 1 else own[:, None]
    if len(layout.order) != own.ndim - 1:
        return own.flatten(1)
    inverse = sorted(range(len(layout.order)), key=layout.order.__getitem__)
    return own.permute(0, *(i + 1 for i in inverse)).flatten(1)
