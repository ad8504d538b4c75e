"""The rows of J of a step on terms, formed sample by sample with `torch.func` and held as one matrix.

n rows in total, (term, sample, residual) in this order; m trainable parameters, ordered by parameter group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jvp, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gramgn.optim.closure import Trained
from gramgn.optim.engines import Options, Stream
from gramgn.optim.gram import BlockLinearisation, Engine
from gramgn.optim.graph import LoopEngine
from gramgn.optim.info import StepInfo, TermInfo
from gramgn.optim.losses import Reading, SquaredError, mean_square
from gramgn.optim.runtime import (
    attention_by_products,
    by_group,
    full_precision_products,
    jacobian_eps,
    product_dtype,
    run_in_mode,
    span,
    zero_gram,
)
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream.recurrent import states_of_one_sample
from gramgn.optim.terms import Residual, Term
from gramgn.optim.verify import Comparison, Verifier, agree, verify
from gramgn.optim.vmap import buffers_kept

CHUNK_BYTES = {"cpu": 2**29}
"""What one chunk of samples may allocate in total, most of which is released on the way; on other devices 4 GiB."""
OF_TERMS = "J of terms is held: lower the number of samples, or the engine's chunk_size (samples at a time)"
"""What to lower where memory runs out."""
TILE = 128
COLUMNS = 4096

Params = dict[str, Tensor]
Shown = tuple[str, float, int, Tensor]
"""Name, weight, number of samples and residuals of a term."""
Chunk = tuple[Tensor, ...]
Form = Callable[..., tuple[Tensor, Params]]
"""Gives the residuals of a chunk of samples, [b] or [b, k], and their rows by parameter, [b, ...] or [b, k, ...]."""


@dataclass(frozen=True)
class RowsLinearisation(BlockLinearisation):
    """r and J of all terms, whose blocks are columns of one matrix."""

    rows: Tensor  # J [n, m], with the columns of a parameter group next to each other

    def gram(self) -> Tensor:
        """Return G = J J^T by parameter group, [groups, n, n] in float64."""
        G, start = zero_gram(self.trained.num_groups, len(self.rows), self.rows.device), 0
        widths = by_group(
            [block.shape[1] for block in self.blocks], self.trained.groups, self.trained.num_groups
        )
        with full_precision_products():
            for group, of_group in enumerate(widths):
                stop = start + int(sum(of_group))
                if stop > start:
                    add_gram_(G[group], self.rows[:, start:stop])
                start = stop
        return G


def add_gram_(G: Tensor, rows: Tensor) -> None:
    """Add rows rows^T to G [n, n], exactly symmetric: tiles of its lower triangle, mirrored.

    Products in float32 or better over at most `COLUMNS` columns, their sum in float64.
    """
    n, size = rows.shape
    J = rows.to(product_dtype(rows.dtype))
    step = size if J.dtype == torch.float64 else COLUMNS
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        tile = G[start:stop, :stop]
        for first in range(0, size, step):
            part = J[:, first : first + step]
            if part.dtype == G.dtype and part.device == G.device:
                tile.addmm_(part[start:stop], part[:stop].T)
            else:
                tile += (part[start:stop] @ part[:stop].T).to(G.device).to(G.dtype)
        own = G[start:stop, start:stop]
        own.copy_((own + own.T) / 2)
        G[:start, start:stop] = G[start:stop, :start].T


class RowMemory:
    """The matrix that holds J, kept between steps; copies of it start empty."""

    def __init__(self) -> None:
        self._matrix = torch.empty(0, 0)
        self._fitting: dict[Any, int] = {}
        self.num_rows = 0
        self.verifier = Verifier()

    def clear(self, m: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start a new J of m columns."""
        self.num_rows = 0
        kept = self._matrix
        if (kept.shape[1], kept.dtype, kept.device) != (m, dtype, device):
            self._matrix = torch.empty(0, m, dtype=dtype, device=device)

    def add(self, num_rows: int, expected: int) -> Tensor:
        """Return the next rows. `expected`: the number of rows that are known to follow."""
        start, stop = self.num_rows, self.num_rows + num_rows
        if stop > len(self._matrix):
            larger = self._matrix.new_empty(stop + expected, self._matrix.shape[1])
            larger[:start] = self._matrix[:start]
            self._matrix = larger
        self.num_rows = stop
        return self._matrix[start:stop]

    def rows(self) -> Tensor:
        """Return J [n, m]."""
        return self._matrix[: self.num_rows]

    def samples_at_a_time(self, model: nn.Module, term: Term, form: Form, chunk_size: int | None) -> int:
        """Return the number of samples whose rows are formed at a time; measured once per kind of term."""
        if chunk_size is not None:
            return chunk_size
        kind = term.kind
        if kind not in self._fitting:
            self._fitting[kind] = _samples_that_fit(model, form, term.tensors)
        return self._fitting[kind]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without the matrix."""
        return vars(RowMemory())


class Objective:
    """The terms of one step: their residuals at the current parameters, and these with their Jacobian.

    Args:
        model: The network.
        trained: The parameters to train.
        terms: The terms.
        convention: The damping convention, which decides how rows are scaled.
        options: The options of the optimizer's engine. With `Loop` or `Rows`, samples are taken one by one, without
            `torch.func.vmap`. Without a `chunk_size`, as many at a time as fit into `CHUNK_BYTES`.
        engine: That engine, for terms that are closures.
        memory: Where J is held.

    Raises:
        ValueError: The engine has an option that terms cannot follow.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Trained,
        terms: Sequence[Term],
        convention: str,
        options: Options,
        engine: Engine,
        memory: RowMemory,
    ) -> None:
        if isinstance(options, Stream) and (options.memory_budget or options.jacobian_dtype) is not None:
            raise ValueError(
                "with terms J is held, in the format of the parameters: build the optimizer with memory_budget=None "
                "and jacobian_dtype=None"
            )
        self.model, self.trained, self.terms, self.memory = model, trained, terms, memory
        self.engine, self.convention = engine, convention
        self.samplewise = isinstance(engine, LoopEngine)
        chunk_size = getattr(options, "chunk_size", None)
        self.chunk_size = chunk_size if isinstance(chunk_size, int) else None
        self.counts: list[int] = []
        """The number of samples of each term, which closures show when they are called."""
        self.residuals: list[Tensor] = []
        """r of each term as its function returned it, [b] or [b, k], at the parameters of `linearise`."""
        self._parts: list[tuple[Residual, Form, list[Chunk]]] = []  # of the terms with samples
        self._by_graph: set[int] = set()  # the numbers of the closures that may differentiate

    def linearise(self) -> RowsLinearisation:
        """Return r and J at the current parameters.

        Raises:
            ValueError: A term does not return residuals, or depends on parameters that are not the model's.
        """
        _load_forward_mode()
        columns, m = _columns(self.trained)
        params = list(self.trained.params.values())
        dtype, device = reduce(torch.promote_types, (param.dtype for param in params)), params[0].device
        self.memory.clear(m, dtype, device)
        self.counts = [term.num_samples for term in self.terms]
        # A closure shows the size of its batch when it is called, and the scales of all terms depend on it.
        known, expected = all(self.counts), sum(self.counts)
        with span("gramgn.backward"):
            for number, term in enumerate(self.terms):
                expected -= term.num_samples
                if term.samples:
                    self._add(term, columns, expected, self._scales()[number] if known else 1.0)
                else:
                    self.counts[number] = self._add_closure(term, columns, expected)
        J, stop = self.memory.rows(), 0
        for r, scale in zip(self.residuals, self._scales(), strict=True):
            start, stop = stop, stop + r.numel()
            if not known:
                J[start:stop] *= scale
        r = self._stacked(self.residuals)
        reading = Reading(mean_square(r), r, r)
        eps = jacobian_eps(self.model, dtype, device)
        blocks = [J[:, part] for part in columns]
        self._verify(blocks, eps)
        return RowsLinearisation(reading, sum(self.counts), eps, blocks, self.trained, J)

    def residual(self) -> Tensor:
        """Return the scaled residuals r [n] at the current parameters, which `linearise` has seen."""
        found, parts = [], iter(self._parts)
        for number, term in enumerate(self.terms):
            # Such a closure, and functions that are run one by one, may differentiate by torch.autograd.
            with torch.set_grad_enabled(self.samplewise or number in self._by_graph):
                if not term.samples:
                    found.append(term.function().detach())
                    continue
                one, _, chunks = next(parts)
                found.append(torch.cat([self._residuals(one, chunk).detach() for chunk in chunks]))
        return self._stacked(found)

    def _verify(self, blocks: Sequence[Tensor], eps: float) -> None:
        """Compare the rows that `torch.func` forms with an ordinary backward pass in some steps; see `Verifier`."""
        by_name = dict(zip(self.trained.params, blocks, strict=True))
        modes = tuple(module.training for module in self.model.modules())
        structure = (modes, self.samplewise, tuple(by_name), *(term.kind for term in self.terms))
        n = sum(r.numel() for r, term in zip(self.residuals, self.terms, strict=True) if term.samples)
        check = self.memory.verifier.begin(structure, self.trained.params)
        if not n or check is None or not check.is_needed(by_name):
            return

        def plain(comparison: Comparison) -> Tensor:
            found: list[Tensor] = []
            for one, _, chunk in self._each_chunk():
                r = self._residuals(one, chunk)
                alone = one(*(tensor[0] for tensor in chunk))
                if not agree(r[0].detach(), alone.detach(), comparison.eps):
                    raise ValueError(_explained_jacobian("", None))
                if r.requires_grad:
                    comparison.expect(r.flatten(), first=sum(map(len, found)))
                found.append(r.detach().flatten())
            return torch.cat(found)

        def engine(comparison: Comparison) -> Tensor:
            found: list[Tensor] = []
            for _, form, chunk in self._each_chunk():
                r, parts = form(*chunk)
                rows = {name: part.reshape(r.numel(), 1, -1) for name, part in parts.items()}
                comparison.pull(rows, sum(map(len, found)))
                found.append(r.flatten())
            return torch.cat(found)

        verify(check, self.model, n, plain, engine, k=1, explain=_explained_jacobian)

    def _each_chunk(self) -> Iterator[tuple[Residual, Form, Chunk]]:
        for one, form, chunks in self._parts:
            for chunk in chunks:
                yield one, form, chunk

    def _residuals(self, one: Residual, chunk: Chunk) -> Tensor:
        """Return the residuals of a chunk of samples, [b] or [b, k]."""
        if self.samplewise:
            return _one_by_one(one, chunk)
        with attention_by_products(), states_of_one_sample(self.model):
            return vmap(one, randomness="different")(*chunk)

    def report(self, info: StepInfo) -> StepInfo:
        """Return the statistics of a step with the loss of all terms, and those of each."""
        return report_terms(info, [self.shown()])

    def shown(self) -> list[Shown]:
        """Return of each term its name, its weight, its number of samples and its residuals."""
        terms = zip(self.terms, self.counts, self.residuals, strict=True)
        return [(term.name, term.weight, num_samples, r) for term, num_samples, r in terms]

    def shared(self, J: RowsLinearisation, counts: Sequence[int]) -> RowsLinearisation:
        """Return r and J, scaled for numbers of samples `counts` of which this process has a share."""
        before, self.counts, stop = self._scales(), list(counts), 0
        for r, old, new in zip(self.residuals, before, self._scales(), strict=True):
            start, stop = stop, stop + r.numel()
            if new != old:
                J.rows[start:stop] *= new / old if old else 0.0
        r = self._stacked(self.residuals)
        return replace(J, reading=Reading(mean_square(r), r, r))

    def _stacked(self, residuals: Sequence[Tensor]) -> Tensor:
        """Return the residuals of all terms, scaled, [n]."""
        scaled = zip(residuals, self._scales(), strict=True)
        return torch.cat([scale * r.detach().flatten() for r, scale in scaled])

    def _scales(self) -> list[float]:
        """Return the factor of each term's rows: sqrt(weight), and of a mean sqrt(B / b) besides."""
        total = sum(self.counts)
        return [
            math.sqrt(term.weight * (1 if self.convention == "sum" else total / num_samples))
            for term, num_samples in zip(self.terms, self.counts, strict=True)
        ]

    def _add_closure(self, term: Term, columns: Sequence[slice], expected: int) -> int:
        """Add the rows of a closure to J, as the optimizer's engine forms them; return its number of samples."""
        J = self.engine.linearise(self.model, self.trained, term.function, SquaredError())
        if J.reading.by_graph:
            self._by_graph.add(len(self.residuals))
        rows = self.memory.add(J.reading.residual.numel(), expected)
        J.write_rows_([rows[:, part] for part in columns])
        self.residuals.append(J.reading.residual)
        return J.num_samples

    def _add(self, term: Term, columns: Sequence[slice], expected: int, scale: float) -> None:
        """Add the rows of a term to J."""
        one = Residual(self.model, term)
        form = self._former(one, term)
        with _explained(term, self.model, self.samplewise), buffers_kept(self.model):
            chunks = _split(
                term.tensors, self.memory.samples_at_a_time(self.model, term, form, self.chunk_size)
            )
            left, parts = term.num_samples, []
            for chunk in chunks:
                r, blocks = form(*chunk)
                left -= len(r)
                rows = self.memory.add(r.numel(), expected + left)
                for name, part in zip(self.trained.params, columns, strict=True):
                    # Each block is released once it is copied.
                    torch.mul(blocks.pop(name).reshape(r.numel(), -1), scale, out=rows[:, part])
                parts.append(r)
        self.residuals.append(torch.cat(parts))
        self._parts.append((one, form, chunks))
        if not rows[0].any():
            with torch.enable_grad():
                _check_dependence(one(*(tensor[0] for tensor in term.tensors)), term)

    def _former(self, one: Residual, term: Term) -> Form:
        """Return the function that forms the rows of a chunk of samples."""
        if isinstance(self.engine, LoopEngine):
            return partial(_by_autograd, self.engine, one, self.trained.params)
        # Everything is detached: the derivatives are taken inside, and a residual that still requires a gradient
        # outside depends on a tensor that is no parameter of the model.
        given = {f"model.{name}": param.detach() for name, param in self.model.named_parameters()}
        own = {f"model.{name}": name for name in self.trained.params}

        def form(*chunk: Tensor) -> tuple[Tensor, Params]:
            def of_one(*sample: Tensor) -> tuple[Tensor, Params]:
                def residuals(params: Params) -> Tensor:
                    return functional_call(one, {**given, **params}, sample)

                return _by_transforms(residuals, {name: given[name] for name in own})

            with attention_by_products(), states_of_one_sample(self.model):
                r, blocks = vmap(of_one, randomness="different")(*chunk)
            if r.requires_grad:
                raise ValueError(
                    f"term {term.name!r} depends on tensors that require gradients and are not parameters of the "
                    "model, so they would not be trained: make them parameters of the model (nn.Parameter), which the "
                    "function reaches as u.name, or detach them"
                )
            return r, {own[name]: block for name, block in blocks.items()}

        return form


def totals(shares: Sequence[Sequence[Shown] | None]) -> list[int]:
    """Return the number of samples of each term on all processes; None: a process has no samples."""
    given = [share for share in shares if share is not None]
    return [
        sum(counts) for counts in zip(*([count for _, _, count, _ in share] for share in given), strict=True)
    ]


def report_terms(info: StepInfo, shares: Sequence[Sequence[Shown] | None]) -> StepInfo:
    """Return the statistics of a step with the loss of all terms, and those of each, on one or several processes.

    Args:
        info: The statistics of the step; the rows of each process follow those of the one before.
        shares: What each process has of each term; None: it has no samples.
    """
    parts: list[list[tuple[Shown, range]]] = []
    stop = 0
    for share in shares:
        for number, shown in enumerate(share or ()):
            start, stop = stop, stop + shown[3].numel()
            if number == len(parts):
                parts.append([])
            parts[number].append((shown, range(start, stop)))
    terms = []
    for several in parts:
        (name, weight, _, first), _ = several[0]
        r = torch.cat([shown[3].to(first.device) for shown, _ in several])
        rows = [row for _, of_share in several for row in of_share]
        terms.append(
            TermInfo(
                name=name,
                weight=weight,
                num_samples=sum(shown[2] for shown, _ in several),
                loss=float(mean_square(r)),
                residual=r,
                gram=info.gram[rows][:, rows] if len(info.gram) else info.gram,
            )
        )
    return replace(info, loss=sum(term.weight * term.loss for term in terms), terms=tuple(terms))


def _by_transforms(residuals: Callable[[Params], Tensor], params: Params) -> tuple[Tensor, Params]:
    """Return the residuals of one sample and their derivative: forward mode where they outnumber the parameters."""
    r, pull = vjp(residuals, params)  # type: ignore[misc]
    if r.numel() == 1:
        (blocks,) = pull(torch.ones_like(r))
    elif r.numel() <= sum(param.numel() for param in params.values()):
        (blocks,) = vmap(pull)(torch.eye(len(r), dtype=r.dtype, device=r.device))
    else:
        blocks = jacfwd(residuals)(params)
    return r, blocks


def _by_autograd(engine: LoopEngine, one: Residual, params: Params, *chunk: Tensor) -> tuple[Tensor, Params]:
    """Return the same of a chunk of samples, taken one by one, with one backward pass per row."""
    r = _one_by_one(one, chunk)
    _check_dependence(r, one.term)
    blocks = engine.blocks(r.flatten(), list(params.values()))
    return r.detach(), dict(zip(params, blocks, strict=True))


def _one_by_one(one: Residual, chunk: Chunk) -> Tensor:
    """Return the residuals of a chunk of samples, [b] or [b, k], without `vmap`."""
    with attention_by_products():  # fused attention has no second derivatives
        return torch.stack([one(*sample) for sample in zip(*chunk, strict=True)])


def _check_dependence(r: Tensor, term: Term) -> None:
    """Reject residuals that no parameter can change."""
    if not r.requires_grad:
        raise ValueError(
            f"term {term.name!r} does not depend on the model's parameters: it must call u, and neither detach "
            "the result nor differentiate it to zero (such as the second derivative of a network with ReLU)"
        )


@cache
def _load_forward_mode() -> None:
    """Load what torch loads at the first use of forward mode, without its warning about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def _columns(trained: Trained) -> tuple[list[slice], int]:
    """Return the columns of each parameter, those of one group next to each other, and the number of columns."""
    columns, stop = [slice(0)] * len(trained.groups), 0
    params = list(trained.params.values())
    for number in sorted(range(len(params)), key=lambda number: trained.groups[number]):
        start, stop = stop, stop + params[number].numel()
        columns[number] = slice(start, stop)
    return columns, stop


def _split(tensors: Sequence[Tensor], step: int) -> list[Chunk]:
    """Return chunks of samples of nearly equal size, at most `step`."""
    return list(zip(*(tensor.chunk(-(-len(tensor) // step)) for tensor in tensors), strict=True))


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that operations allocate."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = run_in_mode(func, args, kwargs)
        if not any(each.alias_info for each in func._schema.returns):
            for tensor in pytree.tree_leaves(returned):
                if isinstance(tensor, Tensor):
                    self.num_bytes += tensor.numel() * tensor.element_size()
        return returned


def _samples_that_fit(model: nn.Module, form: Form, tensors: Sequence[Tensor]) -> int:
    """Return the number of samples that may be taken at a time.

    It does not depend on the memory that is free, so that a resumed run takes the same chunks. The bytes that one
    sample allocates in total are an upper bound of what it holds at a time.
    """
    device = tensors[0].device
    with Snapshot(model, device).kept(), _Allocations() as allocations:
        form(*(tensor[:1] for tensor in tensors))
    return max(1, CHUNK_BYTES.get(device.type, 2**32) // max(1, allocations.num_bytes))


def _explained_jacobian(name: str, error: float | None) -> str:
    """Return what is wrong with a term; see `Explain`."""
    what = "the residuals of a term differ between two calls, or between all samples at once and one alone"
    if error is not None:
        what = f"parameter '{name}': the Jacobian of the terms is not autograd's (relative error {error:.0e})"
    return (
        f"{what}. Either the function, or the network, keeps a state that changes from call to call, or draws random "
        "numbers that are not torch's. Or it contains a gradient that is no derivative, or one "
        "that torch.func cannot form: try engine='rows', which takes one sample after the other"
    )


@contextmanager
def _explained(term: Term, model: nn.Module, samplewise: bool) -> Iterator[None]:
    """Say where torch's own errors come from."""
    try:
        yield
    except RuntimeError as error:
        way = (
            "one sample after the other"
            if samplewise
            else "torch.func for all samples at once; engine='rows' takes one sample after the other, which is slow"
        )
        given, own = _kinds(term.tensors), _kinds(model.parameters())
        error.add_note(
            f"This came from term {term.name!r} with samples {given} (the model: {own}), run by {way}."
        )
        raise


def _kinds(tensors: Iterable[Tensor]) -> str:
    """Return the formats and devices of tensors."""
    return ", ".join(sorted({f"{str(x.dtype).removeprefix('torch.')} on {x.device}" for x in tensors}))
