"""Steps within a memory budget: a batch is measured by a few of its samples, and the first way that fits is taken."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gramgn.optim.closure import Batch, Forward, Trained, flatten_call
from gramgn.optim.gram import Linearisation
from gramgn.optim.losses import Reading
from gramgn.optim.outputs import NotBySampleError, Outputs, joined, transform_around
from gramgn.optim.runtime import attention_by_products, without_fast_path
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.budget import COUNTED, Budget, Counter, Sizes, Watch, Way, choose
from gramgn.optim.stream.chunks import InChunks, in_chunk, only_tensor
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.groups import InGroups
from gramgn.optim.stream.products import MOST_PAIRS
from gramgn.optim.stream.run import Arguments, AtOnce, Run
from gramgn.optim.verify import structure_of

if TYPE_CHECKING:
    from gramgn.optim.stream.engine import StreamEngine

PAIR_BYTES = 128
"""Bytes of a budget per pair that `Products` multiplies at a time, so that pairs take an eighth of it in float32."""


class WithinBudget:
    """Decides, where the closure calls the model, how J is formed, and then forms it so."""

    def __init__(self, engine: StreamEngine, model: nn.Module, trained: Trained, budget: Budget) -> None:
        self.engine, self.model, self.trained, self.budget = engine, model, trained, budget
        self._run: Run | None = None
        self._sizes_of_call: Sizes | None = None

    def forward(
        self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run the model; see `call_closure`."""
        if self._run is None:
            self._run = self._chosen(original, args, kwargs)
        return self._run.forward(original, args, kwargs)

    def linearised(self, reading: Reading, num_samples: int) -> Linearisation:
        """Return the residuals with their J.

        Raises:
            BudgetError: The closure makes so many residuals of the outputs that they do not fit.
        """
        assert self._run is not None
        sizes, k = self._sizes_of_call, reading.residual.numel() // num_samples
        if sizes is not None and k > sizes.num_outputs:
            holds = isinstance(self._run, AtOnce) and not self._run.drop
            least = sizes.fixed(k) + (sizes.jacobian(k) if holds else sizes.largest(k))
            self.budget.check(
                least,
                f"J of {k} residuals per sample, which the closure makes of {sizes.num_outputs} outputs,",
            )
        return self._run.linearised(reading, num_samples)

    def clear(self) -> None:
        """Release the graph."""
        if self._run is not None:
            self._run.clear()

    def _chosen(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        given = (self.engine, self.model, self.trained)
        limit = self.budget.bytes(next(iter(self.trained.params.values())).device)
        batch = self._batch(args, kwargs)
        self._sizes_of_call = sizes = None if batch is None else self._sizes(original, batch)
        if sizes is None:
            return AtOnce(*given)
        way = self._way(sizes)
        if limit is not None:
            self.engine._memories.products.most_pairs = min(MOST_PAIRS, limit // PAIR_BYTES)
        if way.name == "groups":
            self.engine.release()
            return InGroups(*given, sizes=sizes, chunk=way.chunk, most=way.most)
        if way.chunk is not None:
            return InChunks(*given, chunk=way.chunk, most=way.most)
        at_once = AtOnce(*given)
        if way.name == "dropped":
            self.engine.release()
            at_once.drop = True
        return at_once

    def evaluate(self, original: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run the model as it is; without a graph, and where J was formed, on as many samples at a time as fit."""
        batch = None if torch.is_grad_enabled() else self._batch(args, kwargs)
        sizes = None if batch is None else self._known().get(self._key(batch))
        if batch is None or sizes is None or (most := self._way(sizes).most or batch.size) >= batch.size:
            return original(*args, **kwargs)
        outputs = []
        for start in range(0, batch.size, most):
            stop = min(start + most, batch.size)
            of_part, options = batch.chunk(start, stop)
            with in_chunk(start, stop, batch.size):
                outputs.append(only_tensor(original(*of_part, **options)))
        return torch.cat(outputs)

    def _way(self, sizes: Sizes) -> Way:
        chunk_size = self.engine.chunk_size if isinstance(self.engine.chunk_size, int) else None
        return choose(sizes, self.budget.limit, chunk_size, is_rank=self.engine.shared is not None)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        return None if transform_around(flatten_call(args, kwargs)[0]) else Batch.of(args, kwargs)

    def _known(self) -> dict[Hashable, Sizes]:
        return self.budget.sizes.get([self.trained], dict)

    def _key(self, batch: Batch) -> Hashable:
        """Return what identifies a call: whatever may change what its batch needs."""
        return structure_of(self.model, batch, self.trained.params), *map(repr, map(_plain, batch.leaves))

    def _sizes(self, original: Forward, batch: Batch) -> Sizes | None:
        """Return what a batch needs, counted once per kind of call; None where nothing can be counted."""
        known, key = self._known(), self._key(batch)
        if key not in known:
            counted = partial(count, self.engine, self.model, self.trained, original, batch)
            last = batch.size - min(COUNTED, batch.size)
            try:
                with (
                    Snapshot(self.model, next(self.model.parameters()).device).kept(),
                    in_chunk(0, batch.size - last, batch.size),
                ):
                    known[key] = counted(0).larger(counted(last))
            except NotBySampleError:
                return None
        return known[key]


def _plain(leaf: Any) -> Any:
    """Return what an argument of the model can be told from others by, besides its shape."""
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


def count(
    engine: StreamEngine, model: nn.Module, trained: Trained, original: Forward, batch: Batch, start: int
) -> Sizes:
    """Count what a batch needs in passes over a few of its samples from number `start`, forward and backward."""
    few = min(COUNTED, batch.size)
    run = Run(engine, model, trained, anew=True)
    run.memories = replace(run.memories, conv_paths=ConvPaths("static"), warned=set())
    before = Snapshot(model, run.device)

    def arguments() -> Arguments:
        return Batch(*batch.chunk(start, start + few)).copy().chunk(0, few)

    args, kwargs = arguments()
    with Watch() as plain, torch.no_grad(), without_fast_path():
        original(*args, **kwargs)
    args, kwargs = arguments()
    try:
        outputs = Outputs(trained, cut=False)
        # Attention by products stores the most, and is what comparisons and second derivatives need.
        with Watch() as watch, attention_by_products():
            outputs.add(run.record(original, args, kwargs), few, ())
        if not outputs.tensors:
            raise NotBySampleError("the model returns nothing that has one entry per sample")
        flop, output = watch.flop, joined(outputs.tensors)
        q = output.numel() // few
        run.backward.start(output, few, run.network)
        counter = Counter(trained, few, q, Buffers(), run.memories.products)
        # What is decided by the number of samples is decided as for the whole batch.
        counter.b = counter.grams.num_samples = batch.size
        with watch, torch.no_grad():
            run.backward.run(output.new_ones(few, 1, q), counter)
    finally:
        run.clear()
    found = {names: math.ceil(size) for names, size in counter.found.items()}
    idle = [(name,) for name in trained.params if not any(name in names for names in found)]
    return Sizes(
        batch.size,
        q,
        trained.num_groups,
        sum(param.numel() for param in trained.params.values()),
        sum(param.nbytes for param in trained.params.values()),
        watch.of_sample(few),
        plain.of_sample(few),
        found | dict.fromkeys(idle, 0),
        flop // few,
        copies=2 if before.drew_random_numbers() or engine.jacobian_dtype is not None else 1,
    )
