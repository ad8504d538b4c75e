"""Experimental: a step whose work on the device is two CUDA graphs, forward to Gram matrix, and J^T u.

The solve between them is eager. A graph replays kernels on fixed memory: the inputs are copied into tensors that are
held here, and what Python decides during the capture is decided for good. So the user's closure is never captured, only
a function of tensors that was passed for that purpose.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from gramgn.optim.closure import Closure, Trained
from gramgn.optim.ggn import GramGaussNewton
from gramgn.optim.gram import Engine
from gramgn.optim.guards import check_modes
from gramgn.optim.info import StepInfo
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.runtime import explained_out_of_memory
from gramgn.optim.stream import StreamEngine, StreamLinearisation

T = TypeVar("T")
WARM_UP = 3
"""Number of runs before the capture: libraries choose kernels and allocate, and the network is checked."""


class CudaGraph(Generic[T]):
    """A function captured as a CUDA graph.

    Args:
        function: Works on fixed tensors of the device, without a transfer to the host.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = function()

    def replay(self) -> None:
        """Launch the graph on the current stream; the tensors of `result` then hold the new values."""
        self._graph.replay()


def capture(optimizer: GramGaussNewton, residuals: Callable[..., Tensor], *example: Tensor) -> CapturedStep:
    """Capture steps on inputs of fixed shapes in two CUDA graphs: forward to Gram matrix, and J^T u.

    They do the same work without launching every kernel from Python; the solve and everything that is decided by its
    outcome stays eager. What Python does in the network and in `residuals` is done once, now::

        step = optimizer.experimental_capture(lambda x, y: model(x) - y, x, y)
        info = step(x, y)

    Args:
        optimizer: The optimizer.
        residuals: From the inputs to the residuals [b] or [b, k]; calls the model exactly once.
        *example: Inputs of the shapes and dtypes to come, on the network's device; they are copied.

    Returns:
        A function of such inputs that takes a step and returns its `StepInfo`.

    Raises:
        ValueError: The network is not on a CUDA device, or an option cannot be captured: another engine or loss than
            the default ones, `chunk_size`, `memory_budget`.
    """
    trained = optimizer._trained()
    device = next(iter(trained.params.values())).device
    engine = check_capturable(optimizer, device)
    check_modes(device)
    with explained_out_of_memory(trained.params, "Lower the batch size"), torch.enable_grad():
        return CapturedStep(optimizer, engine, trained, residuals, example)


class CapturedStep(Engine):
    """A step of the optimizer that replays two CUDA graphs; `capture` returns it.

    Args:
        optimizer: The optimizer.
        engine: The engine whose options are used, but not its memory.
        trained: The parameters to train.
        residuals: The closure, as a function of the inputs.
        example: Inputs of the shapes, dtypes and device to come.
    """

    def __init__(
        self,
        optimizer: GramGaussNewton,
        engine: StreamEngine,
        trained: Trained,
        residuals: Callable[..., Any],
        example: Sequence[Tensor],
    ) -> None:
        self._optimizer, self._residuals = optimizer, residuals
        self._inputs = [tensor.detach().clone() for tensor in example]
        model, loss, own = optimizer._model, optimizer._loss, copy.deepcopy(engine)
        self._forward = CudaGraph(lambda: own.linearise(model, trained, self._closure, loss))
        J = self._forward.result
        u = torch.zeros_like(J.reading.residual.flatten(), dtype=torch.float64)
        pulled = [torch.zeros_like(param) for param in trained.params.values()]

        def update() -> tuple[Tensor, list[Tensor]]:
            torch._foreach_zero_(pulled)
            self._forward.result.add_vjp_(pulled, u, [1.0] * len(pulled))
            return u, pulled

        self._update = CudaGraph(update)
        self._captured_for = _fixed(model, trained)

    def __call__(self, *inputs: Tensor) -> StepInfo:
        """Take one step.

        Args:
            *inputs: Tensors like those that it was captured with.

        Raises:
            ValueError: They have other shapes or dtypes, or other parameters are trained than at the capture.
        """
        given = [(list(tensor.shape), str(tensor.dtype)) for tensor in inputs]
        expected = [(list(tensor.shape), str(tensor.dtype)) for tensor in self._inputs]
        if given != expected:
            raise ValueError(
                f"this step was captured for inputs {expected}, got {given}: capture another for these, or call "
                "optimizer.step with a closure"
            )
        for memory, tensor in zip(self._inputs, inputs, strict=True):
            memory.copy_(tensor, non_blocking=True)
        eager, self._optimizer._engine = self._optimizer._engine, self
        try:
            # At trial points the function is called without a graph.
            return self._optimizer.step(self._closure)
        finally:
            self._optimizer._engine = eager

    def _closure(self) -> Any:
        return self._residuals(*self._inputs)

    def linearise(self, model: nn.Module, trained: Trained, _: Closure, loss: Loss) -> CapturedLinearisation:
        """Replay the first graph on the inputs; see `Engine`."""
        if _fixed(model, trained) != self._captured_for:
            raise ValueError(
                "the network's trained parameters, their memory or its mode have changed since this step was "
                "captured: capture it again"
            )
        self._forward.replay()
        J = self._forward.result
        assert isinstance(J, StreamLinearisation)
        # Copied once: loss and residual outlive the next step.
        reading = replace(J.reading, loss=J.reading.loss.clone(), residual=J.reading.residual.clone())
        return CapturedLinearisation(reading, J.num_samples, J.eps, J, self._update)


def _fixed(model: nn.Module, trained: Trained) -> Any:
    """Return what a capture depends on."""
    memory = [(name, param.data_ptr()) for name, param in trained.params.items()]
    return memory, [module.training for module in model.modules()]


@dataclass(frozen=True)
class CapturedLinearisation:
    """r and J in the memory of the graphs, until the next replay; see `Linearisation`."""

    reading: Reading
    num_samples: int
    eps: float
    captured: StreamLinearisation
    update: CudaGraph[tuple[Tensor, list[Tensor]]]  # u in, J^T u out

    def gram(self) -> Tensor:
        """Return G by group, copied."""
        return self.captured.gram().clone()

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d, not captured."""
        return self.captured.jvp(direction)

    def write_rows_(self, out: Sequence[Tensor]) -> None:
        """Write J into `out`, not captured."""
        self.captured.write_rows_(out)

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Replay the second graph for J^T u and add it, times the scales."""
        self.update.result[0].copy_(u)
        self.update.replay()
        for tensor, pulled, scale in zip(out, self.update.result[1], scales, strict=True):
            tensor.add_(pulled, alpha=scale)


def check_capturable(optimizer: GramGaussNewton, device: torch.device) -> StreamEngine:
    """Return the engine, and reject what needs another device or engine, or the host during the work."""
    engine: Any = optimizer._engine
    loss = optimizer._options["loss"]
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need the network on a CUDA device; it is on {device.type}")
    if not isinstance(engine, StreamEngine):
        raise ValueError("only engine='stream' can be captured in CUDA graphs")
    if engine.chunk_size is not None or engine.budget is not None:
        raise ValueError(
            "chunk_size and memory_budget cannot be captured in CUDA graphs: set them to None, or "
            "use optimizer.step"
        )
    if loss != "squared_error":
        raise ValueError(
            f"loss={loss!r} cannot be captured in CUDA graphs: its labels are checked on the host"
        )
    return engine
