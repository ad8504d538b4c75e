"""The streaming engine: one forward pass, and one backward pass with respect to layer outputs only.

Samples do not interact, so one backward pass of the summed residuals yields the gradient of every layer's output
for each sample separately; k residuals take k passes. As each of these gradients arrives, the layer's rule turns
it into the layer's block of J, and the product of the block with itself is added to G. Autograd never forms the
summed gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.closure import (
    Batch,
    Closure,
    Forward,
    OwnForward,
    Trained,
    call_closure,
    check_per_sample,
    slopes_of,
)
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.runtime import (
    drew_random_numbers,
    jacobian_eps,
    random_state,
    reduced_precision,
    samples_that_fit,
    span,
)
from gramgn.optim.stream.accumulate import Accumulator
from gramgn.optim.stream.backward import Backward, Memories
from gramgn.optim.stream.capture import end_call, find_owners, recorded_calls, start_call
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.jacobian import (
    ChainedJacobian,
    GraphJacobian,
    HeldJacobian,
    Jacobian,
    StreamLinearisation,
)
from gramgn.optim.stream.verify import Comparison

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StreamEngine:
    """Forms J layer by layer. Memory for J is kept between steps; copies of an engine start without it.

    The arguments are the fields of `gramgn.optim.Stream`, `jacobian_dtype` as a dtype.
    """

    def __init__(
        self,
        *,
        chunk_size: int | str | None = None,
        conv_path: str = "static",
        low_memory: bool = False,
        jacobian_dtype: torch.dtype | None = None,
    ) -> None:
        self.chunk_size, self.low_memory, self.jacobian_dtype = chunk_size, low_memory, jacobian_dtype
        self._memories = Memories(ConvPaths(conv_path))
        self._fitting: dict[int, int] = {}
        # Which arguments had one entry per sample when chunks were compared with the model's own forward.
        self._compared: set[tuple[bool, ...]] = set()

    def linearise(
        self, model: nn.Module, trained: Trained, closure: Closure, loss: Loss
    ) -> StreamLinearisation:
        """Call `closure` once and differentiate its result; see `Engine`.

        Networks for which the result would be wrong are rejected: samples interact, a parameter is read outside its
        module other than by adding or multiplying, or the input of a layer is changed in place.
        """
        run = _InChunks if self.chunk_size is not None else _AtOnce
        calculation = run(self, model, trained)
        try:
            reading, num_samples = call_closure(model, closure, loss, calculation.forward)
            with reduced_precision(self.jacobian_dtype, calculation.leaf.device):
                jacobian = calculation.jacobian(reading)
        finally:
            calculation.clear()
        return StreamLinearisation(
            reading=reading.detached(),
            num_samples=num_samples,
            eps=jacobian_eps(model, calculation.leaf.dtype, calculation.leaf.device, self.jacobian_dtype),
            trained=trained,
            jacobian=jacobian,
        )

    def samples_at_a_time(
        self, batch: Batch, model: nn.Module, forward: Callable[[Arguments], Tensor]
    ) -> int:
        """Return the chunk size for a batch. With `"auto"` it is measured once per batch size."""
        if self.chunk_size != "auto":
            assert isinstance(self.chunk_size, int)
            return self.chunk_size
        if batch.size not in self._fitting:
            self._fitting[batch.size] = samples_that_fit(
                batch.size, model, lambda: forward(batch.chunk(0, 1))
            )
        return self._fitting[batch.size]

    def comparison(
        self, model: nn.Module, trained: Trained, backward: Backward, b: int, k: int, output: Tensor
    ) -> Comparison | None:
        """Return the comparison with autograd to make in this step, or None; see `Verifier.begin`."""
        structure = (b, k, backward.structure(model))
        eps = jacobian_eps(model, output.dtype, output.device, self.jacobian_dtype)
        return self._memories.verifier.begin(structure, trained.params, b, k, eps)

    def state_dict(self) -> dict[str, Any]:
        """Return the choices that were made by measuring."""
        return {
            "conv_paths": dict(self._memories.conv_paths.probed),
            "samples_at_a_time": dict(self._fitting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt earlier choices, so that a resumed run uses the same kernels."""
        self._memories.conv_paths.probed = dict(state["conv_paths"])
        self._fitting = dict(state["samples_at_a_time"])


class _AtOnce:
    """Runs the whole batch forward, and backward once the closure has determined the slopes of the residuals."""

    def __init__(self, engine: StreamEngine, model: nn.Module, trained: Trained) -> None:
        self.engine, self.model, self.trained = engine, model, trained
        self.backward = Backward(trained.params, engine._memories)
        self.leaf: Tensor

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model. The closure receives its output detached from the graph."""
        batch = Batch(args, kwargs)
        self.output = _recorded_forward(
            self.engine, self.model, self.trained, self.backward, original, args, kwargs
        )
        self.backward.start(self.output, batch.size)
        self.leaf = self.output.detach().requires_grad_()
        # A copy, so that a closure may change it in place.
        return self.leaf.clone(), batch.size

    def jacobian(self, reading: Reading) -> Jacobian:
        """Run the backward pass."""
        slopes = slopes_of(reading, self.leaf, self.model)
        b, k, _ = slopes.shape
        drop, memories = self.engine.low_memory, self.engine._memories
        if drop and k > 1:
            raise ValueError(
                f"low_memory needs one residual for each sample, got {k}: the blocks of all residuals would have "
                "to be held at the same time; set low_memory=False"
            )
        comparison = self.engine.comparison(self.model, self.trained, self.backward, b, k, self.leaf)
        sums = Accumulator(self.trained, b, k, memories.buffers, drop=drop, comparison=comparison)
        with torch.no_grad(), span("gramgn.backward"):
            self.backward.run(slopes, sums, keep_graph=drop)
            sums.finish()
        if drop:
            return GraphJacobian(sums.G, self.output, slopes, self.trained.params)
        memories.buffers.keep({name: held.rows for name, held in sums.held.items()})
        return HeldJacobian(sums)

    def clear(self) -> None:
        """Release the graph."""
        self.backward.clear()


class _InChunks:
    """Runs some samples at a time, forward and backward from the outputs, before the closure continues."""

    def __init__(self, engine: StreamEngine, model: nn.Module, trained: Trained) -> None:
        self.engine, self.model, self.trained = engine, model, trained
        self.leaf: Tensor

    def forward(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Run the model and form the Jacobian of its outputs."""
        batch, engine = Batch(args, kwargs), self.engine
        outputs = []

        def plain(arguments: Arguments) -> Tensor:
            with reduced_precision(engine.jacobian_dtype, next(iter(self.trained.params.values())).device):
                return original(*arguments[0], **arguments[1])

        step = engine.samples_at_a_time(batch, self.model, plain)
        for start in range(0, batch.size, step):
            outputs.append(self._chunk(original, batch, start, min(start + step, batch.size)))
        with torch.no_grad(), span("gramgn.backward"):
            self.sums.finish()
        engine._memories.buffers.keep({name: held.rows for name, held in self.sums.held.items()})
        self.leaf = torch.cat(outputs).requires_grad_()
        if step < batch.size and tuple(batch.batched) not in engine._compared:
            check_per_sample(self.model, lambda *a, **k: plain((a, k)), args, kwargs, self.leaf)
            engine._compared.add(tuple(batch.batched))
        return self.leaf.clone(), batch.size

    def _chunk(self, original: Forward, batch: Batch, start: int, stop: int) -> Tensor:
        """Add the part of J of a range of samples, and return their outputs."""
        backward = Backward(self.trained.params, self.engine._memories)
        args, kwargs = batch.chunk(start, stop)
        try:
            output = _recorded_forward(
                self.engine, self.model, self.trained, backward, original, args, kwargs
            )
            backward.start(output, stop - start)
            flat = output.detach().reshape(stop - start, -1)
            q = flat.shape[1]
            if start == 0:
                engine, b = self.engine, batch.size
                comparison = engine.comparison(self.model, self.trained, backward, b, q, flat)
                self.sums = Accumulator(self.trained, b, q, engine._memories.buffers, comparison=comparison)
            slopes = torch.eye(q, dtype=flat.dtype, device=flat.device).expand(stop - start, q, q)
            with (
                torch.no_grad(),
                span("gramgn.backward"),
                reduced_precision(self.engine.jacobian_dtype, flat.device),
            ):
                backward.run(slopes, self.sums, start)
        finally:
            backward.clear()
        return output.detach().reshape(stop - start, *output.shape[1:])

    def jacobian(self, reading: Reading) -> Jacobian:
        """Chain the derivative of the residuals to the Jacobian of the outputs."""
        slopes = slopes_of(reading, self.leaf, self.model)
        return ChainedJacobian(HeldJacobian(self.sums), slopes.to(self.sums.G.device, torch.float64))

    def clear(self) -> None:
        """Do nothing: every chunk has released its graph."""


def _recorded_forward(
    engine: StreamEngine,
    model: nn.Module,
    trained: Trained,
    backward: Backward,
    original: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Run the model's own forward, and record the calls of parameter owners in `backward`."""
    replaced = getattr(original, "__func__", None) is not type(model).forward
    owners = find_owners(model, trained.params, replaced=replaced)
    root = next((owner for owner in owners if owner.module is model), None)
    device = next(iter(trained.params.values())).device
    with (
        span("gramgn.forward"),
        recorded_calls(owners, model, backward.calls, backward.receive),
        reduced_precision(engine.jacobian_dtype, device),
    ):
        if root is None:
            output = original(*args, **kwargs)
        else:
            call = start_call(root, OwnForward(model, original), args, kwargs)
            before = random_state(device)
            output = end_call(call, original(*args, **kwargs), backward.receive)
            call.random = drew_random_numbers(before, device)
            backward.calls.append(call)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return one tensor, got {type(output).__name__}")
    return output
