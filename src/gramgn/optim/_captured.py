"""A step whose device work is two CUDA graphs: forward to Gram matrix, and J^T u. The solve between is eager.

A graph replays kernels on fixed memory: the inputs are copied into tensors that are held here, and what Python
decides during the capture is decided for good. So a user's own closure is never captured, only a function of
tensors that was handed over for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gramgn.optim._info import StepInfo
from gramgn.optim.closure import Closure, Trained
from gramgn.optim.losses import Loss, Reading
from gramgn.optim.stream import StreamEngine, StreamLinearisation

T = TypeVar("T")
WARM_UP = 3
"""Runs before the capture: libraries choose kernels and allocate, and the network is checked."""


class Captured(Protocol[T]):
    """Device work that can be done again on the same memory."""

    result: T

    def replay(self) -> None:
        """Do it again; the tensors of ``result`` hold the new values."""


class CudaGraph(Generic[T]):
    """A function captured as a CUDA graph.

    Args:
        function: Does device work on fixed tensors, and no transfer to the host.
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
        """Launch the graph on the current stream."""
        self._graph.replay()


@dataclass
class Update:
    """The second graph's memory: u in, J^T u out."""

    u: Tensor
    pulled: list[Tensor]


class CapturedEngine:
    """The streaming engine on fixed inputs.

    Args:
        engine: Gives the options; its memory is not used.
        residuals: The closure, as a function of the inputs.
        example: Inputs of the shapes, dtypes and device to come.
        capture: Makes the graphs.
    """

    def __init__(
        self,
        engine: StreamEngine,
        residuals: Callable[..., Any],
        example: Sequence[Tensor],
        capture: Callable[[Callable[[], Any]], Captured[Any]] = CudaGraph,
    ) -> None:
        self.inputs = [tensor.detach().clone() for tensor in example]
        self._engine, self.residuals, self._capture = engine.without_memory(), residuals, capture
        self._forward: Captured[StreamLinearisation] | None = None
        self._update: Captured[Update] | None = None
        self._captured_for: Any = None

    def prepare(self, model: nn.Module, trained: Trained, loss: Loss) -> None:
        """Capture the two graphs."""
        self._forward = self._capture(
            lambda: self._engine.linearise(model, trained, lambda: self.residuals(*self.inputs), loss)
        )
        self._update = self._captured_update(trained)
        self._captured_for = _fixed(model, trained)

    def linearise(self, model: nn.Module, trained: Trained, _: Closure, loss: Loss) -> CapturedLinearisation:
        """Replay the first graph on what ``inputs`` hold; see ``Engine``.

        Raises:
            ValueError: Other parameters are trained than when it was captured, or in another mode.
        """
        assert self._forward is not None
        assert self._update is not None
        if _fixed(model, trained) != self._captured_for:
            raise ValueError(
                "the network's trained parameters, their memory or its mode have changed since this step was "
                "captured: capture it again"
            )
        self._forward.replay()
        captured = self._forward.result
        # Copied once: loss and residual outlive the next step.
        reading = replace(
            captured.reading,
            loss=captured.reading.loss.clone(),
            residual=captured.reading.residual.clone(),
        )
        return CapturedLinearisation(reading, captured, self._update)

    def _captured_update(self, trained: Trained) -> Captured[Update]:
        assert self._forward is not None
        forward = self._forward
        memory = Update(
            torch.zeros_like(forward.result.reading.residual.flatten(), dtype=torch.float64),
            [torch.zeros_like(param) for param in trained.params.values()],
        )

        def update() -> Update:
            torch._foreach_zero_(memory.pulled)
            forward.result.add_vjp_(memory.pulled, memory.u, [1.0] * len(memory.pulled))
            return memory

        return self._capture(update)


def _fixed(model: nn.Module, trained: Trained) -> Any:
    """Return what a capture depends on."""
    memory = [(name, param.data_ptr()) for name, param in trained.params.items()]
    return memory, [module.training for module in model.modules()]


@dataclass(frozen=True)
class CapturedLinearisation:
    """r and J in the memory of the graphs, until the next replay."""

    reading: Reading
    captured: StreamLinearisation
    update: Captured[Update]

    @property
    def num_samples(self) -> int:
        """The number of samples b."""
        return self.captured.num_samples

    @property
    def eps(self) -> float:
        """The relative precision in which J was formed."""
        return self.captured.eps

    def gram(self) -> Tensor:
        """Return G by group, copied."""
        return self.captured.gram().clone()

    def jvp(self, direction: Sequence[Tensor]) -> Tensor:
        """Return J d, not captured."""
        return self.captured.jvp(direction)

    def add_vjp_(self, out: Sequence[Tensor], u: Tensor, scales: Sequence[float]) -> None:
        """Replay the second graph for J^T u and add it, times the scales."""
        self.update.result.u.copy_(u)
        self.update.replay()
        for tensor, pulled, scale in zip(out, self.update.result.pulled, scales, strict=True):
            tensor.add_(pulled, alpha=scale)


class CapturedClosure:
    """The closure of a captured step, on the inputs that the graphs read; it brings its own engine.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: CapturedEngine) -> None:
        self.engine = engine

    def __call__(self) -> Any:
        """Call the function that was captured, without a graph: for trial points."""
        return self.engine.residuals(*self.engine.inputs)


class CapturedStep:
    """A step of the optimizer from two CUDA graphs; ``GramGaussNewton.capture`` makes it.

    Args:
        step: The optimizer's step.
        engine: The engine.
    """

    def __init__(self, step: Callable[[Closure], StepInfo], engine: CapturedEngine) -> None:
        self._step, self._closure = step, CapturedClosure(engine)

    def __call__(self, *inputs: Tensor) -> StepInfo:
        """Take one step.

        Args:
            *inputs: Like those that it was captured with.

        Raises:
            ValueError: They have other shapes or dtypes, or other parameters are trained than at the capture.
        """
        own = self._closure.engine.inputs
        given = [(list(tensor.shape), str(tensor.dtype)) for tensor in inputs]
        expected = [(list(tensor.shape), str(tensor.dtype)) for tensor in own]
        if given != expected:
            raise ValueError(
                f"this step was captured for inputs {expected}, got {given}: capture another for these, or call "
                "optimizer.step with a closure"
            )
        for memory, tensor in zip(own, inputs, strict=True):
            memory.copy_(tensor, non_blocking=True)
        return self._step(self._closure)


def check_capturable(engine: Any, loss: str, device: torch.device) -> StreamEngine:
    """Return the engine, refusing what cannot be captured.

    Raises:
        ValueError: No CUDA device, another engine, or an option that needs the host in the middle of the work.
    """
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need the network on a CUDA device; it is on {device.type}")
    if not isinstance(engine, StreamEngine):
        raise ValueError("only engine='stream' can be captured in CUDA graphs")
    if engine.chunk_size is not None or engine.low_memory:
        raise ValueError(
            "chunk_size and low_memory cannot be captured in CUDA graphs: set them to None and False, or do "
            "without capture"
        )
    if loss != "squared_error":
        raise ValueError(
            f"loss={loss!r} cannot be captured in CUDA graphs: its labels are checked on the host"
        )
    return engine
