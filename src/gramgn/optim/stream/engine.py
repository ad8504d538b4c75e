"""The streaming engine: one forward pass, and one backward pass with respect to layer outputs only.

Samples do not interact, so one backward pass of the summed residuals yields the gradient of every layer's output
for each sample separately; k residuals take k passes. As each of these gradients arrives, the layer's rule turns
it into the layer's block of J, and the product of the block with itself is added to G. Autograd never forms the
summed gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gramgn.optim.closure import (
    Batch,
    Closure,
    Forward,
    Trained,
    call_closure,
    flatten_call,
)
from gramgn.optim.gram import Linearisation
from gramgn.optim.graph import RowsEngine
from gramgn.optim.kept import structure_of
from gramgn.optim.kernels import OFF, choose, load, resumed
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.outputs import OTHER_PARAMETERS, NotBySampleError, Outputs, joined, transform_around
from gramgn.optim.runtime import (
    attention_by_products,
    jacobian_eps,
    reduced_precision,
    samples_that_fit,
    span,
)
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream.accumulate import Accumulator, GramSum
from gramgn.optim.stream.backward import Backward, Memories, Network
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.budget import Budget
from gramgn.optim.stream.capture import find_owners, recorded, recorded_calls
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.jacobian import (
    ChainedJacobian,
    GraphJacobian,
    HeldJacobian,
    Jacobian,
    StreamLinearisation,
)
from gramgn.optim.stream.products import BLAS, Products, preferred_backend
from gramgn.optim.verify import Check, Comparison, check_outputs, check_samples_apart, verify

if TYPE_CHECKING:
    from gramgn.optim.stream.groups import WithinBudget

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

CHUNKED = "chunk_size, or a memory_budget that cannot hold J and all activations,"
CALLED_AGAIN = f"the closure calls the model several times, which {CHUNKED} does not allow"


def only_tensor(returned: Any) -> Tensor:
    """Return the output of a network that is run in chunks."""
    if not isinstance(returned, Tensor):
        raise ValueError(
            f"with {CHUNKED} the model must return one tensor, got {type(returned).__name__}: leave it out, raise the "
            "budget, or return one tensor"
        )
    return returned


class Shared(Protocol):
    """Takes the blocks of J of this process's samples in a step that several processes share."""

    def begin(self, num_samples: int, num_rows: int, way: Hashable) -> GramSum:
        """Return what takes the blocks. `way`: identifies how the network was run."""


@contextmanager
def in_chunk(start: int, stop: int, num_samples: int) -> Iterator[None]:
    """Explain a failure that dividing a batch may have caused."""
    try:
        yield
    except RuntimeError as error:
        if stop - start < num_samples:
            error.add_note(
                f"The network ran on samples {start} to {stop - 1} of {num_samples} (chunk_size or memory_budget): "
                "tensors whose samples are not in the leading dimension, as states [layers, b, ...], were not divided."
            )
        raise


class StreamEngine:
    """Forms J layer by layer. Memory for J is kept between steps; copies of an engine start without it.

    The arguments are the fields of `gramgn.optim.Stream`, `jacobian_dtype` as a dtype, and `backend`: one of
    `BACKENDS`, or None (default) for the processor's.
    """

    def __init__(
        self,
        *,
        chunk_size: int | str | None = None,
        conv_path: str = "static",
        memory_budget: int | str | None = None,
        jacobian_dtype: torch.dtype | None = None,
        kernels: str = "auto",
        backend: str | None = None,
    ) -> None:
        self.chunk_size, self.jacobian_dtype = chunk_size, jacobian_dtype
        self.budget = None if memory_budget is None else Budget(memory_budget)
        self._kernels = kernels
        products = Products(load(choose(kernels)), backend or preferred_backend())
        self._memories = Memories(ConvPaths(conv_path), products)
        self._fitting: dict[int, int] = {}
        self.rows = RowsEngine()
        self.shared: Shared | None = None
        """What takes the blocks of a step that several processes share; set for the length of `linearise`."""

    def linearise(self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss) -> Linearisation:
        """Call `closure` once and differentiate its result; see `Engine`.

        Networks for which the result would be wrong are rejected: samples interact, or the input of a layer is
        changed in place. Where J cannot be formed by samples, it is formed row by row, which is reported once.
        """
        run = self.start(model, trained)
        try:
            return run.linearised(*call_closure(model, closure, loss, run.forward))
        finally:
            run.clear()

    def start(self, model: nn.Module, trained: Trained) -> Run | WithinBudget:
        """Return what forms J in one step."""
        if self.budget is not None:
            from gramgn.optim.stream.groups import WithinBudget  # which builds on this module

            return WithinBudget(self, model, trained, self.budget)
        return (InChunks if self.chunk_size is not None else AtOnce)(self, model, trained)

    def samples_at_a_time(
        self, batch: Batch, model: nn.Module, forward: Callable[[Arguments], Tensor]
    ) -> int:
        """Return the chunk size for a batch. With `"auto"` it is measured once per batch size."""
        if isinstance(self.chunk_size, int):
            return self.chunk_size
        if batch.size not in self._fitting:
            with Snapshot(model, next(model.parameters()).device).kept():
                self._fitting[batch.size] = samples_that_fit(
                    batch.size, model, lambda: forward(batch.copy().chunk(0, 1))
                )
        return self._fitting[batch.size]

    def release(self) -> None:
        """Release the memory that was kept for J."""
        self._memories.buffers = Buffers()

    def kernels_form(self) -> str:
        """Return the form of the compiled kernels, or `"off"`."""
        kernels = self._memories.products.kernels
        return OFF if kernels is None else kernels.form

    def state_dict(self) -> dict[str, Any]:
        """Return the choices that were made by measuring, the kernels, and the preferred backend."""
        return {
            "kernels": self.kernels_form(),
            "backend": self._memories.products.backend,
            "conv_paths": dict(self._memories.conv_paths.probed),
            "samples_at_a_time": dict(self._fitting),
            **({} if self.budget is None else {"memory_budget": self.budget.limit}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt earlier choices, so that a resumed run computes the same; without an entry none was made."""
        kernels = load(resumed(state.get("kernels", OFF), self._kernels))
        self._memories.products = Products(kernels, state.get("backend", BLAS))
        self._memories.conv_paths.probed = dict(state["conv_paths"])
        self._fitting = dict(state["samples_at_a_time"])
        if self.budget is not None:
            self.budget.resume(state.get("memory_budget"))


class Run:
    """What the two ways of forming J in one step have in common.

    `anew`: J is formed a second time, in full precision and in memory of its own, to be compared with autograd.
    """

    check: Check | None = None
    used: Sequence[int] = (0,)  # the numbers of the outputs on which the residuals depend
    drop = False  # whether J is not held: its blocks are dropped once they are multiplied

    def __init__(
        self, engine: StreamEngine, model: nn.Module, trained: Trained, *, anew: bool = False
    ) -> None:
        self.engine, self.model, self.trained = engine, model, trained
        self.memories = replace(engine._memories, buffers=Buffers()) if anew else engine._memories
        self.dtype = None if anew else engine.jacobian_dtype
        self.device = next(iter(trained.params.values())).device
        self.backward = Backward(trained.params, self.memories)

    def forward(
        self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run the model; see `call_closure`."""
        raise NotImplementedError

    def linearised(self, reading: Reading, num_samples: int) -> Linearisation:
        """Return the residuals with their J."""
        raise NotImplementedError

    def selected(self, returned: Any, b: int) -> Tensor:
        """Return those outputs [b, ...] of a call on which the residuals depend."""
        raise NotImplementedError

    def streamed(
        self, reading: Reading, num_samples: int, jacobian: Jacobian, output: Tensor
    ) -> StreamLinearisation:
        """Return the residuals with a J."""
        eps = jacobian_eps(self.model, output.dtype, output.device, self.engine.jacobian_dtype)
        return StreamLinearisation(reading.detached(), num_samples, eps, self.trained, jacobian)

    def reduced_precision(self) -> AbstractContextManager[Any]:
        """Return autocast to the engine's shorter format, if there is one."""
        return reduced_precision(self.dtype, self.device)

    def record(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, and record the calls of parameter owners for the backward pass."""
        self.network = self._current_network(original)
        record = (self.device, self.backward.calls, self.backward.receive)
        owners = [owner for owner in self.network.owners if owner.module is not self.model]
        for root in self.network.owners:
            if root.module is self.model:
                original = recorded(root, original, *record)
        # Fused attention has no second derivatives.
        attention = attention_by_products() if self.drop else nullcontext()
        with span("gramgn.forward"), recorded_calls(owners, *record), self.reduced_precision(), attention:
            return original(*args, **kwargs)

    def _current_network(self, original: Forward) -> Network:
        """Return what follows from the network's modules, as they are now."""
        model, trained = self.model, self.trained
        replaced = getattr(original, "__func__", None) is not type(model).forward

        def read() -> Network:
            owners = find_owners(model, trained.params, replaced=replaced)
            if {name for owner in owners for name in owner.params.values()} != set(trained.params):
                raise NotBySampleError(OTHER_PARAMETERS)
            return Network(
                owners,
                {id(param): name for name, param in trained.params.items()},
                tuple(module.training for module in model.modules()),
            )

        return self.memories.network.get([trained, replaced, *structure_of(model)], read)

    def begin(
        self, b: int, k: int, output: Tensor, *, drop: bool = False, until_verified: bool = False
    ) -> Accumulator:
        """Return an empty sum, with the comparison that is due in this step; see `Verifier`.

        `until_verified`: it is due in each step until all of J has been seen to agree.
        """
        structure = (b, k, self.structure())
        self.eps = jacobian_eps(self.model, output.dtype, output.device, self.dtype)
        self.check = check = self.memories.verifier.begin(structure, self.trained.params)
        shared = self.engine.shared
        due = check is not None and (check.due or (until_verified and bool(check.unverified)))
        return Accumulator(
            self.trained,
            b,
            k,
            self.memories.buffers,
            self.memories.products,
            grams=shared.begin(b, b * k, structure) if shared else None,
            drop=drop,
            comparison=Comparison(self.trained.params, b, k, self.eps) if due else None,
            watched=check.unverified if check else (),
        )

    def woke(self, sums: Accumulator) -> bool:
        """Return whether a block of complete sums that was never compared has become other than zero."""
        if self.check is None or not sums.norms:
            return False
        return self.check.woke(sums.norms, sums.grams.norm())

    def structure(self) -> Any:
        """Return a value that identifies the way in which the network was run."""
        return self.backward.structure()

    def verify(
        self,
        original: Forward,
        batch: Batch,
        sums: Accumulator,
        slopes: Tensor | None,
        *,
        within: bool,
        again: bool = True,
    ) -> None:
        """Compare complete sums with autograd where that is due, or where a block of J is other than zero at last.

        `within`: whether the comparison within the step suffices where it was made in full precision; `again`: whether
        the call can be repeated.
        """
        check = self.check
        if check is None:
            return
        woke = self.woke(sums)
        if sums.comparison is not None:
            full = self.eps <= max(torch.finfo(param.dtype).eps for param in self.trained.params.values())
            suffices = (within and full) or not again
            with check.recorded() as verified:
                verified |= sums.comparison.compare()
                if not suffices:
                    verified.clear()
            if suffices:
                return
        elif not woke or not again:
            return

        def plain(comparison: Comparison) -> Tensor:
            return self.expect(original, batch.copy(), comparison, slopes)

        def engine(comparison: Comparison) -> Tensor:
            run = self.anew()
            anew = Accumulator(
                self.trained,
                sums.b,
                sums.k,
                run.memories.buffers,
                run.memories.products,
                drop=True,
                comparison=comparison,
            )
            try:
                return run.form(original, batch.copy(), anew, slopes)
            finally:
                self.backward.may_mix |= run.backward.may_mix
                run.clear()

        verify(check, self.model, batch.size, plain, engine, k=sums.k)
        self.check_apart(original, batch)

    def expect(
        self, original: Forward, batch: Batch, comparison: Comparison, slopes: Tensor | None
    ) -> Tensor:
        """Add autograd's J^T w of an ordinary pass over the whole batch to a comparison; return the outputs."""
        args, kwargs = batch.chunk(0, batch.size)
        output = check_outputs(self.selected(original(*args, **kwargs), batch.size), self.model, batch.size)
        comparison.expect(output, slopes)
        return output

    def check_apart(self, original: Forward, batch: Batch) -> None:
        """Reject a call that mixes samples, where a comparison with autograd would not show it."""
        if self.backward.may_mix:
            check_samples_apart(self.model, original, batch, batch.size, self.trained.params)

    def anew(self) -> Run:
        """Return what forms the same J a second time, in full precision and in memory of its own."""
        run = type(self)(self.engine, self.model, self.trained, anew=True)
        run.used = self.used
        return run

    def held(self, sums: Accumulator) -> HeldJacobian:
        """Return J of complete sums, whose memory stays until the next step."""
        self.memories.buffers.keep({name: held.rows for name, held in sums.held.items()})
        return HeldJacobian(sums)

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form J once more in given sums, for dr/df [b, k, q] or the outputs themselves; return the outputs."""
        raise NotImplementedError

    def clear(self) -> None:
        """Release the graph."""
        self.backward.clear()


class AtOnce(Run):
    """Runs the whole batch forward, and backward once the closure has determined the slopes of the residuals.

    The closure gets outputs with their graph, so it may call the model several times, and use parts of what it returns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs = Outputs(self.trained, cut=False)
        self.calls: list[tuple[Forward, Batch]] = []

    def forward(
        self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run the model."""
        reason = transform_around(flatten_call(args, kwargs)[0])
        if reason:
            self.outputs.leave_out(reason)
            with self.reduced_precision():
                return original(*args, **kwargs), None
        batch = Batch(args, kwargs)
        try:
            returned = self.record(original, args, kwargs)
        except NotBySampleError as error:
            self.outputs.leave_out(error.reason)
            return original(*args, **kwargs), batch.size
        self.calls.append((original, batch))
        return self.outputs.add(returned, batch.size, batch.given), batch.size

    def linearised(self, reading: Reading, num_samples: int) -> Linearisation:
        """Return the residuals with their J, which is formed row by row where nothing else can be right."""
        try:
            slopes, self.used = self.outputs.slopes(reading)
        except NotBySampleError as error:
            self.engine.rows.note(error.reason)
            return self.engine.rows.of_graph(self.model, self.trained, reading, num_samples, self.calls)
        self.output = joined([self.outputs.tensors[i] for i in self.used])
        return self.streamed(reading, num_samples, self._jacobian(slopes, num_samples), self.output)

    def _jacobian(self, slopes: Tensor, b: int) -> Jacobian:
        """Run the backward pass."""
        self.backward.start(self.output, b, self.network)
        k = slopes.shape[1]
        drop = self.drop
        if drop and k > 1:
            raise ValueError(
                f"memory_budget holds the blocks of one residual per sample, and the closure made {k} of one output: "
                "raise it until J fits, or leave it out"
            )
        # Several calls that depend on one another cannot be repeated one by one, so they are compared in the step.
        several = len(self.calls) > 1
        sums = self.begin(b, k, self.output, drop=drop, until_verified=several)
        if sums.comparison is not None:
            for call in self.calls:
                self.check_apart(*call)
        if sums.comparison is not None:
            self.backward.expect(sums.comparison, slopes)
        with torch.no_grad(), span("gramgn.backward"):
            if sums.grams.rehearsal is not None:
                self._rehearse(slopes, sums, sums.grams.rehearsal)
            with self.reduced_precision():
                self.backward.run(slopes, sums, keep_graph=drop)
            sums.finish()
        J = GraphJacobian(sums.G, self.output, slopes, self.trained.params) if drop else self.held(sums)
        self.verify(*self.calls[0], sums, slopes, within=True, again=not several)
        return J

    def _rehearse(self, slopes: Tensor, sums: Accumulator, rehearsal: GramSum) -> None:
        """Run the backward pass without keeping a block, to see which blocks there are in which order."""
        once = Accumulator(self.trained, sums.b, sums.k, Buffers(), sums.products, grams=rehearsal, drop=True)
        with self.reduced_precision():
            self.backward.run(slopes, once, keep_graph=True, again=True)
        once.finish()
        sums.grams.agree()

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it in one go; see `Run`."""
        assert slopes is not None
        args, kwargs = batch.chunk(0, batch.size)
        output = self.selected(self.record(original, args, kwargs), batch.size)
        self.backward.start(output, batch.size, self.network)
        with torch.no_grad():
            self.backward.run(slopes, sums)
            sums.finish()
        return output.detach()

    def selected(self, returned: Any, b: int) -> Tensor:
        """Return the outputs of one call that are used."""
        outputs = Outputs(self.trained, cut=False)
        outputs.add(returned, b, ())
        return joined([outputs.tensors[i] for i in self.used])


class InChunks(Run):
    """Runs some samples at a time, forward and backward from the outputs, before the closure continues."""

    chunk: int | None = None  # the number of samples; None: the engine's

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model and form the Jacobian of its outputs."""
        batch = Batch(args, kwargs)
        reason = transform_around(batch.given)
        if reason or hasattr(self, "outputs"):
            raise NotBySampleError(reason or CALLED_AGAIN)
        chunks, sums = self._chunks(original, batch)
        self.of_outputs = self.held(sums)
        self.output = torch.cat(chunks)
        self.verify(original, batch, sums, None, within=len(chunks) == 1)
        self.outputs = Outputs(self.trained, cut=True)
        return self.outputs.add(self.output, batch.size, batch.given), batch.size

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it in chunks; see `Run`."""
        return torch.cat(self._chunks(original, batch, sums)[0])

    def selected(self, returned: Any, b: int) -> Tensor:
        """Return the only output."""
        return only_tensor(returned)

    def _chunks(
        self, original: Forward, batch: Batch, sums: Accumulator | None = None
    ) -> tuple[list[Tensor], Accumulator]:
        """Return the outputs of each chunk, and the sums that were filled: those given, or those of the step."""

        def plain(arguments: Arguments) -> Tensor:
            with self.reduced_precision():
                return only_tensor(original(*arguments[0], **arguments[1]))

        step, outputs = self.chunk or self.engine.samples_at_a_time(batch, self.model, plain), []
        for start in range(0, batch.size, step):
            stop = min(start + step, batch.size)
            args, kwargs = batch.chunk(start, stop)
            if sums is not None and sums.comparison is not None and sums.comparison.state is not None:
                sums.comparison.state.restore_python()
            try:
                with in_chunk(start, stop, batch.size):
                    output = only_tensor(self.record(original, args, kwargs))
                    self.backward.start(output, stop - start, self.network)
                    flat = output.detach().reshape(stop - start, -1)
                    q = flat.shape[1]
                    if sums is None:
                        sums = self.begin(batch.size, q, flat)
                        if sums.comparison is not None:
                            self.check_apart(original, Batch(args, kwargs))
                    slopes = torch.eye(q, dtype=flat.dtype, device=flat.device).expand(stop - start, q, q)
                    if sums.comparison is not None and self.check is not None:
                        self.backward.expect(sums.comparison, slopes, start)
                    with torch.no_grad(), span("gramgn.backward"), self.reduced_precision():
                        self.backward.run(slopes, sums, start)
            finally:
                self.clear()
            outputs.append(output.detach().reshape(stop - start, *output.shape[1:]))
        assert sums is not None
        with torch.no_grad(), span("gramgn.backward"):
            sums.finish()
        return outputs, sums

    def linearised(self, reading: Reading, num_samples: int) -> StreamLinearisation:
        """Chain the derivative of the residuals to the Jacobian of the outputs."""
        slopes, _ = self.outputs.slopes(reading)
        J = ChainedJacobian(self.of_outputs, slopes.to(self.of_outputs.gram().device, torch.float64))
        return self.streamed(reading, num_samples, J, self.output)
