"""Batches whose Jacobian does not fit: J by groups of parameters, G summed group by group.

For each group of parameters, all samples run forward and backward in chunks with only these parameters trained; the
group's columns J_g of J are held for the whole batch, G += J_g J_g^T, and dropped. J^T u takes one backward pass
weighted by u, in chunks. b samples, k residuals and q outputs per sample.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gramgn.optim.closure import Batch, Forward, Trained
from gramgn.optim.kept import Kept
from gramgn.optim.losses import Reading
from gramgn.optim.outputs import Outputs
from gramgn.optim.runtime import float64_home, jacobian_eps, span, without_fast_path
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.backward import Backward, Network
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.budget import Sizes, grouped, text
from gramgn.optim.stream.chunks import InChunks
from gramgn.optim.stream.jacobian import NO_ROWS, GraphJacobian, HeldJacobian, StreamLinearisation
from gramgn.optim.stream.run import Run
from gramgn.optim.verify import SLACK, Comparison, agree

ALIGNED = 64
"""Bytes, to a multiple of which blocks are aligned."""


@dataclass(frozen=True)
class Group:
    """Parameters whose columns of J are held at the same time."""

    trained: Trained
    size: int  # of these columns, in bytes
    network: Kept[Network]  # what the engine keeps for them between steps


class Arena(Buffers):
    """One piece of memory for the blocks of one group after the other; all else has memory of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._used = size, 0
        self._memory: Tensor | None = None
        self._given: dict[Hashable, Tensor] = {}

    def start(self) -> None:
        """Give the memory to the next group."""
        self._used, self._given = 0, {}

    def get(self, name: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory: for blocks of J in the arena, as long as it lasts."""
        if not (isinstance(name, tuple) and name[0] == "J"):
            return super().get(name, shape, like)
        held = self._given.get(name)
        if held is None or held.numel() != math.prod(shape) or held.dtype != like.dtype:
            held = self._given[name] = self._cut(shape, like)
        return held.view(shape)

    def _cut(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=torch.uint8, device=like.device)
        start, size = self._used, like.element_size() * math.prod(shape)
        if start + size > self._size:
            return like.new_empty(shape)
        self._used = -(-(start + size) // ALIGNED) * ALIGNED
        return self._memory[start : start + size].view(like.dtype).view(shape)


@contextmanager
def only(trained: Trained, group: Trained) -> Iterator[None]:
    """Let autograd know the parameters of a group alone."""
    others = [param for name, param in trained.params.items() if name not in group.params]
    try:
        for param in others:
            param.requires_grad_(False)
        with without_fast_path():
            yield
    finally:
        for param in others:
            param.requires_grad_(True)


class InGroups(InChunks):
    """Runs the model for its outputs alone, and forms J by groups once the closure has made residuals of them.

    All passes start from the state in which the closure found the network, and divide the batch alike, so that they
    draw the same random numbers.

    Args:
        given: What every run is given.
        sizes: What the batch needs.
        options: Those of `InChunks`.
    """

    def __init__(self, *given: Any, sizes: Sizes, **options: Any) -> None:
        super().__init__(*given, **options)
        self.sizes = sizes
        self.structures: list[Any] = []
        self.norms: dict[str, Tensor] = {}
        self.forward_s = 0.0

    def anew(self) -> InGroups:
        """Return what forms the same J a second time, in full precision."""
        given = self.engine, self.model, self.trained
        return InGroups(*given, sizes=self.sizes, chunk=self.chunk, most=self.most, anew=True)

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model in chunks, without a graph."""
        batch, laps = self.take_call(original, args, kwargs), Laps(self.device)
        with torch.no_grad(), without_fast_path(), span("gramgn.forward"):
            self.output = self.outputs_of(self.call, self.chunk, lambda *_: laps.end(), is_first=True)
        self.forward_s = laps.seconds()
        self.eps = jacobian_eps(self.model, self.output.dtype, self.device, self.dtype)
        self.outputs = Outputs(self.trained, cut=True)
        return self.outputs.add(self.output, batch.size, batch.given), batch.size

    def linearised(self, reading: Reading, num_samples: int) -> StreamLinearisation:
        """Form G by groups."""
        slopes, _ = self.outputs.slopes(reading)
        k, device = slopes.shape[1], float64_home(self.device)
        G = torch.zeros(self.trained.num_groups, *2 * (num_samples * k,), dtype=torch.float64, device=device)
        # J^T w costs next to nothing where J is multiplied, and is at hand where a comparison turns out to be due.
        comparison = Comparison(self.trained.params, num_samples, k, self.eps, slack=SLACK)
        self.each_group(slopes, lambda sums: G.add_(sums.G), comparison)
        sums = self.begin(num_samples, k, self.output)
        sums.comparison, sums.grams.G = comparison, G
        sums.norms = {name: self.norms[name] for name in sums.watched if name in self.norms}
        self.verify(*self.call, sums, slopes)
        return self.streamed(reading, num_samples, GroupedJacobian(G, self, slopes), self.output)

    def structure(self) -> Any:
        """Return what identifies the way in which the network was run for each group."""
        return tuple(self.structures)

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it by groups once more; see `Run`."""
        comparison = sums.comparison
        assert slopes is not None
        assert comparison is not None
        assert comparison.state is not None
        self.before, self.call = comparison.state, (original, batch)
        self.each_group(slopes, lambda _: None, comparison)
        return self.output

    def each_group(
        self, slopes: Tensor, take: Callable[[Accumulator], object], comparison: Comparison | None = None
    ) -> None:
        """Form the columns of J of one group of parameters after the other, and let `take` use them."""
        groups = self.groups(slopes.shape[1])
        arena = Arena(max(group.size for group in groups) + ALIGNED * len(self.trained.params))
        self.structures.clear()
        for number, group in enumerate(groups):
            laps = Laps(self.device)
            sums = self._columns(group, slopes, arena, comparison, laps)
            take(sums)
            if number == 0:
                self._note([group.size for group in groups], slopes.shape[1], laps.seconds())
            del sums
            arena.start()

    def pulled(self, slopes: Tensor, u: Tensor) -> dict[str, Tensor]:
        """Return J^T u for u [b, k], by one backward pass weighted by u, in chunks."""
        params = self.trained.params
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        scales = dict.fromkeys(params, 1.0)

        def take(output: Tensor, start: int, stop: int) -> None:
            self._check_same(output, start, stop)
            if output.requires_grad:
                part = GraphJacobian(u, output, slopes[start:stop], params)
                part.add_vjp_(total, u[start:stop], scales)

        with self.again():
            self.outputs_of(self.call, self.chunk, take)
        return total

    def _columns(
        self, group: Group, slopes: Tensor, arena: Arena, comparison: Comparison | None, laps: Laps
    ) -> Accumulator:
        """Return the columns of J of one group."""
        run = Run(self.engine, self.model, group.trained)
        run.dtype, run.memories = self.dtype, replace(self.memories, network=group.network, buffers=arena)
        run.backward = Backward(group.trained.params, run.memories, self.trained.params)
        (b, k), params = slopes.shape[:2], group.trained.params
        anew = comparison is not None and comparison.state is not None
        sums = Accumulator(
            group.trained, b, k, arena, run.memories.products, comparison=comparison, watched=params
        )
        found = []

        def take(output: Tensor, start: int, stop: int) -> None:
            if not anew:
                self._check_same(output, start, stop)
            if output.requires_grad:
                run.backward.start(output, stop - start, run.network)
                with torch.no_grad(), span("gramgn.backward"), run.reduced_precision():
                    run.backward.run(slopes[start:stop], sums, start)
                found.append(run.backward.structure())
                self.backward.may_mix |= run.backward.may_mix
            run.clear()
            laps.end()

        try:
            with only(self.trained, group.trained), self.again():
                output = self.outputs_of(
                    self.call, self.chunk, take, run.record, self.before if anew else None
                )
        finally:
            run.clear()
        with torch.no_grad(), span("gramgn.backward"):
            sums.finish()
        if anew:
            self.output = output
        self.norms |= sums.norms
        self.structures.append(tuple(dict.fromkeys(found)))
        return sums

    def _check_same(self, output: Tensor, start: int, stop: int) -> None:
        """Reject a network that does not repeat its outputs."""
        expected = self.output[start:stop]
        if not agree(output.detach().reshape(expected.shape), expected, self.eps):
            raise ValueError(
                f"{type(self.model).__name__} returned other outputs when it was run again on the same samples, from "
                "the same state and with the same random numbers: a memory_budget that cannot hold J runs it several "
                "times. Raise the budget, "
                "or leave memory_budget out"
            )

    def groups(self, k: int) -> list[Group]:
        """Return the groups of parameters for k residuals per sample."""
        budget, trained = self.engine.budget, self.trained
        assert budget is not None
        limit, of_name = budget.bytes(self.device), dict(zip(trained.params, trained.groups, strict=True))
        known = budget.groups.get([trained], dict)
        key = (self.sizes.num_samples, tuple(self.sizes.held.items()), k, self.chunk, limit)
        if key not in known:
            known[key] = []
            for names, size in grouped(self.sizes, limit, k, self.chunk):
                params = {name: trained.params[name] for name in names}
                part = Trained(params, tuple(of_name[name] for name in names), trained.num_groups)
                known[key].append(Group(part, size, Kept()))
        return known[key]

    def _note(self, sizes: Sequence[int], k: int, first_s: float) -> None:
        """Report once what it costs to form J in groups."""
        budget = self.engine.budget
        assert budget is not None
        if budget.noted:
            return
        budget.noted = True
        num, b = len(sizes), self.sizes.num_samples
        forward_s = self.forward_s
        # The passes backward, each of which reaches a deeper layer than the one before.
        backward = [forward_s * k * (number + 1) / num for number in range(num)]
        rest_s = max(0.0, first_s - forward_s - backward[0]) * sum(sizes) / max(1, sizes[0])
        seconds = forward_s * (num + 4) + sum(backward) + rest_s
        given = "'least'" if budget.limit is None else text(budget.limit)
        warnings.warn(
            f"GramGaussNewton: J takes {text(sum(sizes))} and memory_budget is {given}, so a step forms J in {num} "
            f"group{'s' * (num > 1)} of parameters, {self.chunk} of {b} samples at a time: at most "
            f"{self.sizes.operations(k, num):.2g} floating point operations per step (all of J at once: "
            f"{self.sizes.operations(k, 0):.2g}), and about {seconds:.2g} s by the time of the first group",
            RuntimeWarning,
            stacklevel=7,
        )


class Laps:
    """Takes the time of passes over one chunk of samples after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times = [self._now()]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def end(self) -> None:
        """End a chunk."""
        self._times.append(self._now())

    def seconds(self) -> float:
        """Return the time of all chunks; the first, in which much is done once, counts like the others if there are."""
        laps = [after - before for before, after in pairwise(self._times)]
        return sum(laps[1:]) + (min(laps) if len(laps) > 1 else sum(laps))


@dataclass(frozen=True)
class GroupedJacobian:
    """J that is not held: products with it form it once more, by groups, or go backward."""

    G: Tensor  # of each parameter group
    run: InGroups
    slopes: Tensor  # dr/df [b, k, q]

    def gram(self) -> Tensor:
        """Return G."""
        return self.G

    def jvp(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return J d, by groups."""
        product = self.G.new_zeros(self.G.shape[1])
        self.run.each_group(self.slopes, lambda sums: product.add_(HeldJacobian(sums).jvp(direction)))
        return product

    def add_vjp_(self, out: Mapping[str, Tensor], u: Tensor, scales: Mapping[str, float]) -> None:
        """Add J^T u, scaled per parameter, to `out`, which may be the parameters."""
        b, k, _ = self.slopes.shape
        pulled = self.run.pulled(self.slopes, u.to(self.slopes.device, self.slopes.dtype).view(b, k))
        for name, tensor in pulled.items():
            out[name].add_(tensor, alpha=scales[name])

    def write_rows_(self, out: Mapping[str, Tensor]) -> None:
        """Reject it: the rows were dropped."""
        raise ValueError(NO_ROWS)
