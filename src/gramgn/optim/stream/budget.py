"""The memory budget: what one sample of a batch needs, counted, and the cheapest way to J that fits.

b samples, q outputs and k residuals per sample, m parameters. Sizes are in bytes.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gramgn.optim.kept import Kept
from gramgn.optim.runtime import free_bytes, run_in_mode
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.blocks import Block, Factors

AUTO_SHARE = 2
"""`"auto"` is a fraction 1 / AUTO_SHARE of the memory that is available at the first step."""

CHUNK_SHARE = 4
"""The activations of one chunk take at most a fraction 1 / CHUNK_SHARE of a budget that cannot hold J."""

COUNTED = 2
"""The number of samples on which sizes are counted: the first, and the last, since batches are sorted by length."""

OF_PARAMS = 5
"""The number of tensors like the parameters that a step has: J^T u, both sides of a comparison, and with momentum d."""

COPIES = 1.5
"""What tensors and copies of them inside of libraries, as oneDNN's in other layouts, take relative to the tensors."""


class BudgetError(ValueError):
    """A budget is too small for a step."""


@dataclass(frozen=True)
class Sizes:
    """What a batch needs.

    Attributes:
        num_samples: b.
        num_outputs: q.
        num_groups: The number of parameter groups, each of which has its own G.
        num_params: m.
        params: All trained parameters, in bytes.
        activations: What a forward and a backward pass of one sample take, without J.
        outputs: What a forward pass of one sample without a graph takes.
        held: J of one sample and q residuals, by the names of the parameters that are held together, in the order in
            which the backward pass forms it: last layers first.
        flop: Floating point operations of one sample's forward pass.
        copies: How often J is held at the most: twice where chunks of samples form it a second time to be compared.
    """

    num_samples: int
    num_outputs: int
    num_groups: int
    num_params: int
    params: int
    activations: int
    outputs: int
    held: Mapping[tuple[str, ...], int]
    flop: int
    copies: int = 1

    def larger(self, other: Sizes) -> Sizes:
        """Return what suffices for both of two parts of a batch."""
        each = "activations", "outputs", "flop"
        held = {names: max(size, other.held.get(names, 0)) for names, size in self.held.items()}
        most = {name: max(getattr(self, name), getattr(other, name)) for name in each}
        return replace(self, held={**other.held, **held}, **most)

    def jacobian(self, k: int, blocks: Iterable[tuple[str, ...]] | None = None) -> int:
        """Return the size of J of the whole batch for k residuals per sample, or of some of its blocks."""
        of_sample = sum(self.held.values()) if blocks is None else sum(self.held[names] for names in blocks)
        return math.ceil(of_sample * self.num_samples * k / self.num_outputs)

    def largest(self, k: int) -> int:
        """Return the size of the largest block of J."""
        return max(self.jacobian(k, [each]) for each in self.held)

    def fixed(self, k: int) -> int:
        """Return what is needed however J is formed: G of each group and the solve, J^T u and the step."""
        return 8 * (self.num_samples * k) ** 2 * (2 * self.num_groups + 3) + OF_PARAMS * self.params

    def operations(self, k: int, num_groups: int) -> float:
        """Return the floating point operations of a step with J in groups of parameters, at most; 0: with all of J.

        With groups: one forward pass for the residuals; per group a forward pass and k passes backward to its first
        layer; the blocks of J; one pass forward and backward, with the gradients of the parameters, for J^T u. In both
        cases the products in G.
        """
        passes = 1 + 2 * k if num_groups == 0 else 1 + num_groups * (1 + k) + k + 3
        return passes * self.num_samples * self.flop + self.num_params * (self.num_samples * k) ** 2


@dataclass(frozen=True)
class Way:
    """A way to J.

    Attributes:
        name: `"whole"`: J is held. `"dropped"`: each block is dropped once it is multiplied, and J^T u takes a second
            backward pass. `"groups"`: J is formed by groups of parameters.
        chunk: The number of samples at a time; None: the whole batch.
        most: That of a pass without a graph; None: the whole batch.
    """

    name: str
    chunk: int | None = None
    most: int | None = None


def choose(sizes: Sizes, limit: int | None, chunk_size: int | None, *, is_rank: bool = False) -> Way:
    """Return the cheapest way to J of a batch that fits into `limit` bytes; None: the cheapest that does not hold J.

    `is_rank`: the batch is one rank's part of a larger one. Then J is held, or its blocks are dropped once they are
    sent, as `None` asks for.

    Raises:
        BudgetError: None fits.
    """
    b, k, a = sizes.num_samples, sizes.num_outputs, max(1, sizes.activations)
    # At least two chunks, so that blocks are written into the memory that is kept for them.
    most = math.ceil(b / 2)
    if limit is None:
        whole = k == 1 and chunk_size is None
        if is_rank and not whole:
            raise BudgetError(
                "memory_budget='least' on several ranks is for one output per sample, without chunk_size: set it to a "
                "number of bytes"
            )
        return Way("dropped") if whole else Way("groups", min(most, chunk_size or b))
    room = limit - sizes.fixed(k)
    J, largest = sizes.jacobian(k), sizes.largest(k)
    # What is left for chunks of samples, which are compared with autograd two at a time.
    beside = (room - sizes.copies * J) // (2 * a)

    def in_chunks(name: str, chunk: int, held: int) -> Way:
        # Without a graph, layers may be computed in other ways for many samples than for the few that are counted.
        return Way(name, chunk, max(2 * chunk, (room - held) // max(1, sizes.outputs, a // 4)))

    if chunk_size is None:
        # A comparison forms J once more, block by block.
        if J + largest + b * a <= room:
            return Way("whole")
        if beside >= 1:
            return in_chunks("whole", min(most, beside), sizes.copies * J)
        if k == 1 and largest + b * a <= room and not is_rank:
            return Way("dropped")
    elif min(b, chunk_size) <= beside:
        return in_chunks("whole", chunk_size, sizes.copies * J)
    if is_rank:
        least = sizes.fixed(k) + sizes.copies * J + 2 * min(b, chunk_size or 1) * a
        raise BudgetError(
            f"memory_budget is {text(limit)} ({limit} bytes), and each of several ranks holds the rows of J of its own "
            f"samples, which takes at least {text(least)} ({least} bytes) here. Start more ranks, raise the budget, or "
            "set it to 'least', for one output per sample"
        )
    chunk = min(most, chunk_size or max(1, room // CHUNK_SHARE // a))
    if chunk_size is None:
        chunk = max(1, min(chunk, (room - largest) // a))
    if largest + chunk * a > room:
        least = sizes.fixed(k) + largest + chunk * a
        names = max(sizes.held.items(), key=lambda item: item[1])[0]
        raise BudgetError(
            f"memory_budget is {text(limit)} ({limit} bytes), and the smallest with which a step on {b} samples works "
            f"is {least} bytes ({text(least)}): {text(largest)} for the rows of the largest parameter "
            f"({' and '.join(names)}), {text(chunk * a)} for the "
            f"activations of {chunk} sample{'s' * (chunk > 1)} and {text(sizes.fixed(k))} for G, the solve and "
            "copies of the parameters. Raise it, or lower the batch size"
            + (" or chunk_size" if chunk > 1 else "")
        )
    return in_chunks("groups", chunk, 0)


def grouped(sizes: Sizes, limit: int | None, k: int, chunk: int) -> list[tuple[list[str], int]]:
    """Return the names of the parameters of each group, and the size of its part of J.

    Last layers come first, so that most backward passes are short.
    """
    room = sizes.largest(k) if limit is None else limit - sizes.fixed(k) - chunk * sizes.activations
    groups: list[list[tuple[str, ...]]] = [[]]
    for names in sizes.held:
        if groups[-1] and sizes.jacobian(k, [*groups[-1], names]) > room:
            groups.append([])
        groups[-1].append(names)
    return [([name for names in group for name in names], sizes.jacobian(k, group)) for group in groups]


def text(size: float) -> str:
    """Return a size for people."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} bytes"


class Counter(Accumulator):
    """Takes the blocks of a few samples and keeps their sizes alone, in the order in which they arrive."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[tuple[str, ...], float] = {}

    def rows(self, name: str, parts: int, size: int, like: Tensor) -> Tensor:
        """Return memory for a block."""
        start, stop = self._range
        return like.new_empty(parts, stop - start, size)

    def add_block(self, name: str, block: Block) -> None:
        """Count rows, of which there is one per residual."""
        self._count((name,), block.rows.nbytes * self.k)

    def add_factors(self, key: str, factors: Factors) -> None:
        """Count factors, of which the inputs are shared by all residuals."""
        inputs = factors.tokens if hasattr(factors, "tokens") else factors.A
        self._count(tuple(factors.names()), inputs.nbytes + factors.D.nbytes * self.k)

    def _count(self, names: tuple[str, ...], size: float) -> None:
        start, stop = self._range
        # A parameter that is used several times is complete once its first layer is reached.
        self.found[names] = max(self.found.pop(names, 0), size / (stop - start))


class Watch(TorchDispatchMode):
    """Counts the floating point operations of products and convolutions, and the memory of new tensors.

    Attributes:
        flop: The number of operations.
        peak: The most bytes that were in use at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flop = self.peak = self._used = 0
        self._sizes: dict[int, int] = {}  # of known storages; 0 for those that were there before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        self._add((args, kwargs), new=False)
        result = run_in_mode(func, args, kwargs)
        self._add(result, new=True)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flop += count(*args, **(kwargs or {}), out_val=result)
        return result

    def _add(self, values: Any, *, new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes() if new else 0
                    self._used += self._sizes[key]
                    self.peak = max(self.peak, self._used)
                    weakref.finalize(storage, self._remove, key)

    def of_sample(self, num_samples: int) -> int:
        """Return the most bytes per sample, with what libraries copy."""
        return int(COPIES * self.peak) // num_samples

    def _remove(self, key: int) -> None:
        self._used -= self._sizes.pop(key)


class Budget:
    """The memory budget of an engine, and the sizes that were counted for it.

    Args:
        given: The number of bytes, `"auto"`, or `"least"`.

    Attributes:
        limit: The number of bytes; None: not yet known, or as few as possible.
        sizes: By what identifies a call of the model.
        groups: The groups of parameters, by that and by what else decides them.
        noted: Whether the cost of forming J in groups was reported.
    """

    def __init__(self, given: int | str) -> None:
        self._given = given
        self.limit = given if isinstance(given, int) else None
        self.sizes: Kept[dict[Hashable, Sizes]] = Kept()
        self.groups: Kept[dict[Hashable, Any]] = Kept()
        self.noted = False

    @property
    def drops(self) -> bool:
        """Whether J is never held."""
        return self._given == "least"

    def bytes(self, device: torch.device) -> int | None:
        """Return the number of bytes; `"auto"` is decided once. None: J is not held."""
        if self.limit is None and self._given == "auto":
            # Ranks of one machine share its memory; each has a GPU of its own.
            ranks = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.limit = free_bytes(device) // (AUTO_SHARE * ranks)
        return self.limit

    def check(self, size: int, what: str) -> None:
        """Raise a `BudgetError` if what is needed in any case exceeds the budget."""
        if self.limit is not None and size > self.limit:
            raise BudgetError(
                f"memory_budget is {text(self.limit)} ({self.limit} bytes), and {what} takes at least {text(size)} "
                f"({size} bytes). Raise it, or lower the batch size"
            )

    def resume(self, limit: int | None) -> None:
        """Adopt the number of bytes with which a run began."""
        if self._given == "auto":
            self.limit = limit
