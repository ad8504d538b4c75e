"""The optional packages: Opacus, BackPACK and torch-levenberg-marquardt, each at its best on the same update.

Opacus and BackPACK compute the per-sample gradients of a sum, that is, J of the outputs; `gram_update` does the
rest. torch-levenberg-marquardt takes its own step. The hooks of the first two see only parameters of modules that
have a rule; the scalars of Fixup belong to the block itself, so `wrapped` turns them into modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.problem import ALPHA, Problem
from gramgn.models import ResNetFixup

CONTIGUOUS = "contiguous"
LAST = "channels last"
SAVE_MEMORY = "less memory"
FORMATS = (CONTIGUOUS, LAST)
SMALL = 64
WRAPPED = ".value"
"""The suffix that wrapping adds to the name of a scalar."""
BACKPACK_VARIANTS = (*FORMATS, SAVE_MEMORY, f"{SAVE_MEMORY}, {LAST}")


@dataclass(frozen=True)
class Prepared:
    """A path with its own copy of the network, ready to take steps.

    Attributes:
        step: Takes one step.
        model: The network that it trains.
    """

    step: Callable[[], object]
    model: nn.Module


def gram_update(
    params: Sequence[Tensor], blocks: Sequence[Tensor], residual: Tensor, alpha_sum: float, lr: float
) -> None:
    """Move `params` by -lr J^T (J J^T + alpha_sum I)^-1 r: Algorithm 1 of arXiv 1905.11675, lam = 1.

    Products in the blocks' dtype, their sum and the solve in float64, as in our own optimizer.

    Args:
        params: The trained parameters.
        blocks: The per-sample gradients of the outputs [b, *shape] for each parameter.
        residual: r [b].
        alpha_sum: The damping added to the sum J J^T.
        lr: Factor on the step.
    """
    flat = [block.flatten(start_dim=1) for block in blocks]
    small = [block for block in flat if block.shape[1] <= SMALL]
    # A product for each scalar would cost more in calls than in arithmetic.
    products = [block for block in flat if block.shape[1] > SMALL] + ([torch.cat(small, 1)] if small else [])
    G = torch.zeros(len(residual), len(residual), dtype=torch.float64, device=residual.device)
    for block in products:
        G += block @ block.T
    G.diagonal().add_(alpha_sum)
    u = torch.cholesky_solve(residual.double()[:, None], torch.linalg.cholesky(G))[:, 0]
    u = (lr * u).to(residual.dtype)
    for param, block in zip(params, flat, strict=True):
        param.sub_((u @ block).view_as(param))


class ScalarBias(nn.Module):
    """x + value, for one trained number."""

    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = nn.Parameter(value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Add the number to every entry."""
        return x + self.value


class ScalarScale(ScalarBias):
    """x * value, for one trained number."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply every entry by the number."""
        return x * self.value


class _WrappedBlock(nn.Module):
    """A Fixup block with its scalars as modules."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.bias1a, self.bias1b = ScalarBias(block.bias1a), ScalarBias(block.bias1b)
        self.bias2a, self.bias2b = ScalarBias(block.bias2a), ScalarBias(block.bias2b)
        self.scale = ScalarScale(block.scale)
        self.conv1, self.conv2 = copy.deepcopy(block.conv1), copy.deepcopy(block.conv2)
        self.shortcut = copy.deepcopy(block.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, C, H, W] as the wrapped block does."""
        branch = torch.relu(self.bias1b(self.conv1(self.bias1a(x))))
        branch = self.bias2b(self.scale(self.conv2(self.bias2a(branch))))
        output: Tensor = torch.relu(branch + self.shortcut(x))
        return output


class _WrappedFixup(nn.Module):
    """A `ResNetFixup` with one output and its scalars as modules."""

    def __init__(self, network: ResNetFixup) -> None:
        super().__init__()
        self.stem = copy.deepcopy(network.stem)
        self.bias1 = ScalarBias(network.bias1)
        self.blocks = nn.Sequential(*(_WrappedBlock(block) for block in network.blocks))
        self.bias2 = ScalarBias(network.bias2)
        self.last = copy.deepcopy(network.last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [b, C, H, W] to outputs [b]."""
        x = self.blocks(torch.relu(self.bias1(self.stem(x))))
        output: Tensor = self.last(self.bias2(x.mean(dim=(2, 3))))
        return output[:, 0]


def wrapped(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that hooks can serve.

    Every parameter belongs to its own module, and no ReLU changes its input in place, which hooks would reject.
    """
    if isinstance(model, ResNetFixup):
        return _WrappedFixup(model)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def plain_name(name: str) -> str:
    """Return the name of a parameter of a wrapped network in the original network."""
    return name.removeprefix("_module.").removesuffix(WRAPPED)


def _wrapped(problem: Problem, variant: str) -> tuple[nn.Module, Tensor]:
    model, x = problem.copied(channels_last=LAST in variant)
    return wrapped(model), x


def _of_bias(slopes: Tensor) -> Tensor:
    """Return the per-sample gradient [b, 1] of a scalar bias, given that of its output [b, ...]."""
    return slopes.flatten(start_dim=1).sum(dim=1, keepdim=True)


def opacus(problem: Problem, lr: float, variant: str) -> Prepared:
    """Opacus' hooks (`GradSampleModule`); the scalars get a registered grad sampler."""
    from opacus.grad_sample import GradSampleModule, register_grad_sampler

    def bias(layer: ScalarBias, activations: list[Tensor], slopes: Tensor) -> dict[nn.Parameter, Tensor]:
        return {layer.value: _of_bias(slopes)}

    def scale(layer: ScalarScale, activations: list[Tensor], slopes: Tensor) -> dict[nn.Parameter, Tensor]:
        return {layer.value: _of_bias(slopes * activations[0])}

    register_grad_sampler(ScalarBias)(bias)
    register_grad_sampler(ScalarScale)(scale)
    model, x = _wrapped(problem, variant)
    y = problem.y
    sampled: Any = GradSampleModule(model, loss_reduction="sum")
    params: list[Any] = list(model.parameters())

    def step() -> None:
        output = sampled(x)
        output.sum().backward()
        with torch.no_grad():
            blocks = [param.grad_sample for param in params]
            gram_update(params, blocks, output.detach() - y, problem.alpha_sum, lr)
        for param in params:
            param.grad = param.grad_sample = None

    return Prepared(step, model)


def backpack(problem: Problem, lr: float, variant: str) -> Prepared:
    """BackPACK's `BatchGrad`; the scalars get their own extension."""
    import backpack as package
    from backpack.core.derivatives.convnd import weight_jac_t_save_memory
    from backpack.extensions import BatchGrad
    from backpack.extensions.firstorder.base import FirstOrderModuleExtension

    class OfBias(FirstOrderModuleExtension):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__(params=["value"])

        def value(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
            return _of_bias(g_out[0])

    class OfScale(OfBias):
        def value(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
            return _of_bias(g_out[0] * module.input0)

    model, x = _wrapped(problem, variant)
    y = problem.y
    for module in model.modules():
        # Not the blocks around them: BackPACK would warn at each of them in every step.
        if next(module.parameters(recurse=False), None) is not None:
            package.extend(module)
    per_sample = BatchGrad()
    per_sample.set_module_extension(ScalarBias, OfBias())
    per_sample.set_module_extension(ScalarScale, OfScale())
    params: list[Any] = list(model.parameters())

    def step() -> None:
        output = model(x)
        with package.backpack(per_sample), weight_jac_t_save_memory(SAVE_MEMORY in variant):
            output.sum().backward()
        with torch.no_grad():
            blocks = [param.grad_batch for param in params]
            gram_update(params, blocks, output.detach() - y, problem.alpha_sum, lr)
        for param in params:
            param.grad = None
            del param.grad_batch

    return Prepared(step, model)


def torch_lm(problem: Problem, lr: float, variant: str) -> Prepared:
    """One step of `LevenbergMarquardtModule`.

    It divides J J^T and r by b before it adds its damping to the diagonal, so its damping is alpha in the mean
    convention. The step is taken without checking that the loss fell.
    """
    from torch_levenberg_marquardt.damping import StandardDampingStrategy
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule

    model, x = problem.copied(channels_last=variant == LAST)
    y = problem.y
    module: Any = LevenbergMarquardtModule(
        model,
        damping_strategy=StandardDampingStrategy(starting_value=ALPHA),
        learning_rate=lr,
        attempts_per_step=0,
        solve_method="cholesky",
    )
    return Prepared(lambda: module.training_step(x, y), model)
