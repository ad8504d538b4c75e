"""The streaming engine: one forward pass, and one backward pass with respect to layer outputs only.

Samples do not interact, so one backward pass of the summed residuals yields the gradient of every layer's output
for each sample separately; k residuals take k passes. As each of these gradients arrives, the layer's rule turns
it into the layer's block of J, and the product of the block with itself is added to G. Autograd never forms the
summed gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim.closure import Batch, Closure, Trained, call_closure, replaced_forward
from gramgn.optim.gram import Linearisation
from gramgn.optim.graph import RowsEngine
from gramgn.optim.kernels import OFF, choose, load, resumed
from gramgn.optim.losses import Loss
from gramgn.optim.runtime import samples_that_fit
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.stream.backward import Memories
from gramgn.optim.stream.blocks import Buffers
from gramgn.optim.stream.budget import Budget
from gramgn.optim.stream.chunks import InChunks
from gramgn.optim.stream.conv import ConvPaths
from gramgn.optim.stream.products import BLAS, Products, preferred_backend
from gramgn.optim.stream.run import Arguments, AtOnce, Run, Shared
from gramgn.optim.stream.within import WithinBudget


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
            return WithinBudget(self, model, trained, self.budget)
        return (InChunks if self.chunk_size is not None else AtOnce)(self, model, trained)

    def evaluating(self, model: nn.Module, trained: Trained) -> AbstractContextManager[None]:
        """Let the model run within the memory budget where the closure is called for the loss alone."""
        if self.budget is None:
            return nullcontext()
        return replaced_forward(model, WithinBudget(self, model, trained, self.budget).evaluate)

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
