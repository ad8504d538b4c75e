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

from gramgn.optim._call import Closure
from gramgn.optim._losses import Loss, Reading
from gramgn.optim._parameters import Trained
from gramgn.optim._stream import StreamEngine, StreamLinearisation

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
        residuals: What the loss reads, from the inputs.
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
        self._engine, self._residuals, self._capture = engine.without_memory(), residuals, capture
        self._forward: Captured[StreamLinearisation] | None = None
        self._update: Captured[Update] | None = None
        self._names: tuple[str, ...] = ()

    def linearise(self, model: nn.Module, trained: Trained, _: Closure, loss: Loss) -> CapturedLinearisation:
        """Replay the first graph on what ``inputs`` hold; see ``Engine``.

        Raises:
            ValueError: Other parameters are trained than when it was captured.
        """
        names = (*trained.params, str(model.training))
        if self._forward is None or self._update is None:
            self._forward = self._capture(
                lambda: self._engine.linearise(model, trained, lambda: self._residuals(*self.inputs), loss)
            )
            self._names, self._update = names, self._captured_update(trained)
        elif names != self._names:
            raise ValueError(
                "the network's parameters to train, or its mode, have changed since this step was captured: "
                "capture it again"
            )
        self._forward.replay()
        return CapturedLinearisation(self._forward.result, self._update)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's choices."""
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over choices; only before the capture."""
        self._engine.load_state_dict(state)


@dataclass(frozen=True)
class CapturedLinearisation:
    """r and J in the memory of the graphs, until the next replay."""

    captured: StreamLinearisation
    update: Captured[Update]

    @property
    def reading(self) -> Reading:
        """Loss and residual, copied: they outlive the next step."""
        reading = self.captured.reading
        return replace(reading, loss=reading.loss.clone(), residual=reading.residual.clone())

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
