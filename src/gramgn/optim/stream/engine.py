"""The streaming engine: one forward pass, and one backward pass with respect to layer outputs only.

Samples do not interact, so one backward pass of the summed residuals yields the gradient of every layer's output
for each sample separately; k residuals take k passes. As each of these gradients arrives, the layer's rule turns
it into the layer's block of J, and the product of the block with itself is added to G. Autograd never forms the
summed gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.closure import (
    Batch,
    Closure,
    Forward,
    Trained,
    call_closure,
    slopes_of,
)
from gramgn.optim.gram import Linearisation
from gramgn.optim.kept import structure_of
from gramgn.optim.kernels import OFF, choose, load, resumed
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.runtime import (
    attention_by_products,
    jacobian_eps,
    reduced_precision,
    samples_that_fit,
    span,
)
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.backward import Backward, Memories, Network
from gramgn.optim.stream.blocks import Buffers
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
from gramgn.optim.verify import Check, Comparison, verify

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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
        low_memory: bool = False,
        jacobian_dtype: torch.dtype | None = None,
        kernels: str = "auto",
        backend: str | None = None,
    ) -> None:
        self.chunk_size, self.low_memory, self.jacobian_dtype = chunk_size, low_memory, jacobian_dtype
        self._kernels = kernels
        products = Products(load(choose(kernels)), backend or preferred_backend())
        self._memories = Memories(ConvPaths(conv_path), products)
        self._fitting: dict[int, int] = {}

    def kernels_for(self, model: nn.Module, trained: Trained) -> str:
        """Return the form of the compiled kernels, or `"off"`."""
        return self._form()

    def linearise(self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss) -> Linearisation:
        """Call `closure` once and differentiate its result; see `Engine`.

        Networks for which the result would be wrong are rejected: samples interact, a parameter is read outside its
        module other than by adding or multiplying, or the input of a layer is changed in place.
        """
        run = self.start(model, trained)
        try:
            return run.linearised(*call_closure(model, closure, loss, run.forward))
        finally:
            run.clear()

    def start(self, model: nn.Module, trained: Trained) -> _Run:
        """Return what forms J in one step."""
        return (_InChunks if self.chunk_size is not None else _AtOnce)(self, model, trained)

    def samples_at_a_time(
        self, batch: Batch, model: nn.Module, forward: Callable[[Arguments], Tensor]
    ) -> int:
        """Return the chunk size for a batch. With `"auto"` it is measured once per batch size."""
        if self.chunk_size != "auto":
            assert isinstance(self.chunk_size, int)
            return self.chunk_size
        if batch.size not in self._fitting:
            with Snapshot(model, next(model.parameters()).device).kept():
                self._fitting[batch.size] = samples_that_fit(
                    batch.size, model, lambda: forward(batch.copy().chunk(0, 1))
                )
        return self._fitting[batch.size]

    def _form(self) -> str:
        kernels = self._memories.products.kernels
        return OFF if kernels is None else kernels.form

    def state_dict(self) -> dict[str, Any]:
        """Return the choices that were made by measuring, the kernels, and the preferred backend."""
        return {
            "kernels": self._form(),
            "backend": self._memories.products.backend,
            "conv_paths": dict(self._memories.conv_paths.probed),
            "samples_at_a_time": dict(self._fitting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt earlier choices, so that a resumed run computes the same; without an entry none was made."""
        kernels = load(resumed(state.get("kernels", OFF), self._kernels))
        self._memories.products = Products(kernels, state.get("backend", BLAS))
        self._memories.conv_paths.probed = dict(state["conv_paths"])
        self._fitting = dict(state["samples_at_a_time"])


class _Run:
    """What the two ways of forming J in one step have in common; `leaf` is the output that the closure sees.

    `anew`: J is formed a second time, in full precision and in memory of its own, to be compared with autograd.
    """

    leaf: Tensor
    check: Check | None = None

    def __init__(
        self, engine: StreamEngine, model: nn.Module, trained: Trained, *, anew: bool = False
    ) -> None:
        self.engine, self.model, self.trained = engine, model, trained
        self.memories = replace(engine._memories, buffers=Buffers()) if anew else engine._memories
        self.dtype = None if anew else engine.jacobian_dtype
        self.device = next(iter(trained.params.values())).device
        self.backward = Backward(trained.params, self.memories)

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model; see `call_closure`."""
        raise NotImplementedError

    def jacobian(self, reading: Reading) -> Jacobian:
        """Return J of the residuals."""
        raise NotImplementedError

    def linearised(self, reading: Reading, num_samples: int) -> StreamLinearisation:
        """Return the residuals with their J."""
        jacobian = self.jacobian(reading)
        eps = jacobian_eps(self.model, self.leaf.dtype, self.leaf.device, self.engine.jacobian_dtype)
        return StreamLinearisation(reading.detached(), num_samples, eps, self.trained, jacobian)

    def reduced_precision(self) -> AbstractContextManager[Any]:
        """Return autocast to the engine's shorter format, if there is one."""
        return reduced_precision(self.dtype, self.device)

    def record(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the model's own forward, and record the calls of parameter owners for the backward pass."""
        self.network = self._current_network(original)
        record = (self.device, self.backward.calls, self.backward.receive)
        owners = [owner for owner in self.network.owners if owner.module is not self.model]
        for root in self.network.owners:
            if root.module is self.model:
                original = recorded(root, original, *record)
        # Fused attention has no second derivatives.
        attention = attention_by_products() if self.engine.low_memory else nullcontext()
        with span("gramgn.forward"), recorded_calls(owners, *record), self.reduced_precision(), attention:
            output = original(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
        return output

    def _current_network(self, original: Forward) -> Network:
        """Return what follows from the network's modules, as they are now."""
        model, trained = self.model, self.trained
        replaced = getattr(original, "__func__", None) is not type(model).forward

        def read() -> Network:
            return Network(
                find_owners(model, trained.params, replaced=replaced),
                {id(param): name for name, param in trained.params.items()},
                tuple(module.training for module in model.modules()),
            )

        return self.memories.network.get([trained, replaced, *structure_of(model)], read)

    def begin(self, b: int, k: int, output: Tensor, *, drop: bool = False) -> Accumulator:
        """Return an empty sum, with the comparison that is due in this step; see `Verifier`."""
        structure = (b, k, self.backward.structure())
        self.eps = jacobian_eps(self.model, output.dtype, output.device, self.dtype)
        self.check = check = self.memories.verifier.begin(structure, self.trained.params)
        return Accumulator(
            self.trained,
            b,
            k,
            self.memories.buffers,
            self.memories.products,
            drop=drop,
            comparison=Comparison(self.trained.params, b, k, self.eps) if check and check.due else None,
            watched=check.unverified if check else (),
        )

    def verify(
        self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None, *, alone: bool
    ) -> None:
        """Compare complete sums with autograd where that is due, or where a block of J is other than zero at last.

        `alone`: whether the comparison within the step suffices where it was made in full precision.
        """
        check = self.check
        if check is None:
            return
        woke = bool(sums.norms) and check.woke(
            sums.norms, float(sums.G.diagonal(dim1=1, dim2=2).sum().clamp(min=0).sqrt())
        )
        if sums.comparison is not None:
            full = self.eps <= max(torch.finfo(param.dtype).eps for param in self.trained.params.values())
            with check.recorded() as verified:
                verified |= sums.comparison.compare()
                if not (alone and full):
                    verified.clear()
            if alone and full:
                return
        elif not woke:
            return

        def engine(batch: Batch, comparison: Comparison) -> Tensor:
            run = type(self)(self.engine, self.model, self.trained, anew=True)
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
                return run.form(original, batch, anew, slopes)
            finally:
                run.clear()

        verify(check, self.model, original, batch, engine, k=sums.k, slopes=slopes)

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


class _AtOnce(_Run):
    """Runs the whole batch forward, and backward once the closure has determined the slopes of the residuals."""

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model. The closure receives its output detached from the graph."""
        self.original, self.batch = original, Batch(args, kwargs)
        self.output = self.record(original, args, kwargs)
        self.backward.start(self.output, self.batch.size, self.network)
        self.leaf = self.output.detach().requires_grad_()
        # A copy, so that a closure may change it in place.
        return self.leaf.clone(), self.batch.size

    def jacobian(self, reading: Reading) -> Jacobian:
        """Run the backward pass."""
        slopes = slopes_of(reading, self.leaf, self.model)
        b, k, _ = slopes.shape
        drop = self.engine.low_memory
        if drop and k > 1:
            raise ValueError(
                f"low_memory needs one residual for each sample, got {k}: the blocks of all residuals would have "
                "to be held at the same time; set low_memory=False"
            )
        sums = self.begin(b, k, self.leaf, drop=drop)
        if sums.comparison is not None:
            self.backward.expect(sums.comparison, slopes)
        with torch.no_grad(), span("gramgn.backward"):
            with self.reduced_precision():
                self.backward.run(slopes, sums, keep_graph=drop)
            sums.finish()
        J = GraphJacobian(sums.G, self.output, slopes, self.trained.params) if drop else self.held(sums)
        self.verify(self.original, self.batch, sums, slopes, alone=True)
        return J

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it in one go; see `_Run`."""
        assert slopes is not None
        args, kwargs = batch.chunk(0, batch.size)
        output = self.record(original, args, kwargs)
        self.backward.start(output, batch.size, self.network)
        with torch.no_grad():
            self.backward.run(slopes, sums)
            sums.finish()
        return output.detach()


class _InChunks(_Run):
    """Runs some samples at a time, forward and backward from the outputs, before the closure continues."""

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model and form the Jacobian of its outputs."""
        batch = Batch(args, kwargs)
        outputs, sums = self._chunks(original, batch)
        self.of_outputs = self.held(sums)
        self.leaf = torch.cat(outputs).requires_grad_()
        self.verify(original, batch, sums, None, alone=len(outputs) == 1)
        return self.leaf.clone(), batch.size

    def form(self, original: Forward, batch: Batch, sums: Accumulator, slopes: Tensor | None) -> Tensor:
        """Form it in chunks; see `_Run`."""
        return torch.cat(self._chunks(original, batch, sums)[0])

    def _chunks(
        self, original: Forward, batch: Batch, sums: Accumulator | None = None
    ) -> tuple[list[Tensor], Accumulator]:
        """Return the outputs of each chunk, and the sums that were filled: those given, or those of the step."""

        def plain(arguments: Arguments) -> Tensor:
            with self.reduced_precision():
                return original(*arguments[0], **arguments[1])

        step, outputs = self.engine.samples_at_a_time(batch, self.model, plain), []
        for start in range(0, batch.size, step):
            stop = min(start + step, batch.size)
            args, kwargs = batch.chunk(start, stop)
            if sums is not None and sums.comparison is not None and sums.comparison.state is not None:
                sums.comparison.state.restore_python()
            try:
                output = self.record(original, args, kwargs)
                self.backward.start(output, stop - start, self.network)
                flat = output.detach().reshape(stop - start, -1)
                q = flat.shape[1]
                if sums is None:
                    sums = self.begin(batch.size, q, flat)
                slopes = torch.eye(q, dtype=flat.dtype, device=flat.device).expand(stop - start, q, q)
                if sums.comparison is not None and self.check is not None:
                    self.backward.expect(sums.comparison, slopes, start)
                with torch.no_grad(), span("gramgn.backward"), self.reduced_precision():
                    self.backward.run(slopes, sums, start)
            except RuntimeError as error:
                if stop - start < batch.size:
                    error.add_note(
                        f"The network ran on samples {start} to {stop - 1} of {batch.size} (chunk_size): tensors whose "
                        "samples are not in the leading dimension, as states [layers, b, ...], were not divided."
                    )
                raise
            finally:
                self.clear()
            outputs.append(output.detach().reshape(stop - start, *output.shape[1:]))
        assert sums is not None
        with torch.no_grad(), span("gramgn.backward"):
            sums.finish()
        return outputs, sums

    def jacobian(self, reading: Reading) -> Jacobian:
        """Chain the derivative of the residuals to the Jacobian of the outputs."""
        slopes = slopes_of(reading, self.leaf, self.model)
        return ChainedJacobian(self.of_outputs, slopes.to(self.of_outputs.gram().device, torch.float64))
