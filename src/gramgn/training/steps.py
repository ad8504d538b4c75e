"""One training step, the same for every optimizer: residuals in, a report out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.errors import ConfigError, InputError, first_line
from gramgn.optim import StepInfo
from gramgn.training.device import rng_state, set_rng_state
from gramgn.training.meter import StepReport
from gramgn.training.ranks import ALONE, Ranks


class NonFiniteLoss(Exception):  # noqa: N818 - a signal from the closure to the step, never seen outside
    """Raised inside a closure so that the optimizer does not step."""


def residuals(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return f - y, shape [b].

    Raises:
        InputError: The outputs do not have the targets' shape. Broadcasting [b, 1] against [b] would silently
            give [b, b] (T01).
    """
    outputs = model(inputs)
    if not isinstance(outputs, Tensor) or outputs.shape != targets.shape:
        got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InputError(
            f"the network must return one number per sample, shape {list(targets.shape)} like the targets; "
            f"it returned {got}. End its forward with .squeeze(-1), or use num_outputs=1"
        )
    return outputs - targets


def takes_model(optimizer_class: Any) -> bool:
    """Return whether an optimizer is built from the module itself: its class has `takes_model = True`.

    The `step` of such an optimizer is given a closure that returns the residuals, and returns a
    `gramgn.optim.StepInfo`; any other is built from `parameters()` and given a closure that returns the loss.
    """
    return getattr(optimizer_class, "takes_model", False) is True


class Stepper:
    """Takes training steps with either kind of optimizer.

    Args:
        model: The network.
        optimizer: Either kind, see `takes_model`.
        compile: Compile the network's forward and backward for the steps (G19). The network itself stays as it
            is, so that evaluation and `state_dict` see nothing of it. `check_compile` finds out beforehand
            whether that is possible.
        ranks: The processes that train, each on its share of a batch. Gradients are averaged over them by
            DistributedDataParallel; an optimizer of the residuals has its own way.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        compile: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._ranks = ranks
        self._compile = compile
        self._wants_residuals = takes_model(type(optimizer))
        # dynamic=False: there are at most two shapes, the whole and the last batch, each faster for itself.
        compiled = compile and not self._wants_residuals
        self._network: Any = torch.compile(model, dynamic=False) if compiled else model
        if not self._wants_residuals:
            self._network = ranks.wrapped(self._network)
        self._captured: dict[torch.Size, Callable[[Tensor, Tensor], StepInfo]] = {}

    def prepare(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Compile the steps if that was asked for.

        Weights, buffers, gradients and the random state are as before.

        Args:
            batches: One batch (inputs, targets) of each shape that there will be.

        Raises:
            ConfigError: The network cannot be compiled.
        """
        if not self._compile:
            return
        if self._wants_residuals:
            self._captured = _captured_steps(self.model, self.optimizer, batches)
            return
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        random = rng_state()
        with _compiler_errors():
            for inputs, targets in batches:
                residuals(self._network, inputs, targets).square().mean().backward()
        self.optimizer.zero_grad()
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        set_rng_state(random)

    def __call__(self, inputs: Tensor, targets: Tensor, *, num_samples: int | None = None) -> StepReport:
        """Take one step on inputs [b, ...] and targets [b].

        Args:
            inputs: Those of this rank, perhaps none.
            targets: Likewise.
            num_samples: Number of samples of all ranks; default b.

        Raises:
            ConfigError: An optimizer with `takes_model = True` does not return a `StepInfo`, or does not call the
                closure.
        """
        num_samples = len(targets) if num_samples is None else num_samples
        if not self._wants_residuals:
            return self._gradient_step(inputs, targets, num_samples)
        first: list[Tensor] = []

        def closure() -> Tensor:
            residual = residuals(self.model, inputs, targets)
            if not first:
                first.append(residual.detach())
            return residual

        captured = self._captured.get(inputs.shape)
        if captured is not None:
            info = captured(inputs, targets)
        else:
            step: Any = self.optimizer.step
            info = step(closure if len(targets) else None)
            if not isinstance(info, StepInfo):
                raise ConfigError(
                    f"{type(self.optimizer).__name__} has takes_model = True, so its step must return a "
                    f"gramgn.optim.StepInfo, but it returned {type(info).__name__}. "
                    "StepInfo(loss=..., num_samples=...) is enough"
                )
            if not first and not info.residual.numel():
                raise ConfigError(f"{type(self.optimizer).__name__}: its step did not call the closure")
        residual = info.residual if info.residual.numel() else first[0]
        loss, absolute_error = float(info.loss), float(residual.abs().mean())
        finite = info.status != "non_finite" and math.isfinite(loss)
        return StepReport(num_samples, loss, absolute_error, finite, info=info)

    def _gradient_step(self, inputs: Tensor, targets: Tensor, num_samples: int) -> StepReport:
        first: list[list[float]] = []
        is_alone, weight = self._ranks.size == 1, 1.0
        if not len(targets):  # all ranks must pass gradients on: those of a sample that does not count
            inputs, targets, weight = inputs.new_zeros((1, *inputs.shape[1:])), targets.new_zeros(1), 0.0

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            residual = residuals(self._network, inputs, targets)
            # Gradients are averaged over ranks, which have different numbers of samples.
            share = weight * self._ranks.size / num_samples
            loss = residual.square().mean() if is_alone else residual.square().sum() * share
            loss.backward()
            gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).to(loss)
            with torch.no_grad():  # one transfer for the three, so that the device is waited for once
                error = residual.abs().mean() if is_alone else residual.abs().sum() * share
                seen = torch.stack((loss, error, norm)).tolist()
            if not is_alone:
                seen[:2] = [total / self._ranks.size for total in self._ranks.sums(*seen[:2])]
                loss = loss.new_tensor(seen[0])
            first.append(seen)
            if not all(map(math.isfinite, seen)):
                raise NonFiniteLoss
            return loss

        try:
            step: Any = self.optimizer.step
            step(torch.enable_grad()(closure))
            finite = True
        except NonFiniteLoss:
            finite = False
        # An optimizer that calls the closure more than once (a line search) is reported by its first call.
        loss, absolute_error, grad_norm = first[0]
        return StepReport(num_samples, loss, absolute_error, finite, grad_norm)


def check_compile(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Reject `trainer.compile=true` before any work where it is not possible.

    Compiles one small function: 3 s, or about 30 s on a machine whose compiler has cached nothing yet.

    Raises:
        ConfigError: The optimizer is one of the residuals and the device not CUDA, or torch.compile does not work:
            on a CPU for want of a C++ compiler, on CUDA of Triton.
    """
    if not takes_model(type(optimizer)):
        with _compiler_errors():
            torch.compile(lambda x: x.sin() + 1, dynamic=False)(torch.ones(8, device=device))
    elif device.type != "cuda":
        raise ConfigError(
            f"trainer.compile=true: {type(optimizer).__name__} runs uncompiled on {device.type}; on CUDA it uses "
            "CUDA graphs. Use trainer.compile=false here (optimizers that take parameters() do compile)"
        )


def _captured_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[torch.Size, Callable[[Tensor, Tensor], StepInfo]]:
    """Return steps of an optimizer of the residuals in CUDA graphs, by the shape of their inputs.

    Called once, before the first step and off the clock of training, with one batch of each shape.

    Raises:
        ConfigError: The optimizer has no `experimental_capture`, or cannot capture what it was built with.
    """
    capture = getattr(optimizer, "experimental_capture", None)
    if capture is None:
        raise ConfigError(
            f"trainer.compile=true: {type(optimizer).__name__} offers no captured steps (a method "
            "'experimental_capture'); use trainer.compile=false"
        )
    try:
        return {
            inputs.shape: capture(lambda x, y: residuals(model, x, y), inputs, targets)
            for inputs, targets in batches
        }
    except ValueError as error:
        raise ConfigError(f"trainer.compile=true: {error}") from error


@contextmanager
def _compiler_errors() -> Iterator[None]:
    """Turn whatever torch.compile raises inside into one ConfigError."""
    # torch has no public name for these errors; importing them is slow, so only where something compiles.
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None) or error
        raise ConfigError(
            f"trainer.compile=true, but torch.compile fails here ({type(inner).__name__}: {first_line(inner)}). "
            "On a CPU it needs a C++ compiler (g++ or clang++ on the path, or CXX=<its path>), on CUDA Triton "
            "and a C compiler; trainer.compile=false does without"
        ) from error
