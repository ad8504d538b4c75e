"""The optional packages: Opacus, BackPACK and torch-levenberg-marquardt, each at its best on the same update.

Opacus and BackPACK give per-sample gradients of a sum, so J of the outputs; ``gram_update`` does the rest.
torch-levenberg-marquardt takes its own step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gramgn.bench._networks import ScalarBias, ScalarScale, wrapped
from gramgn.bench._prepared import Prepared, gram_update
from gramgn.bench._problem import ALPHA, Problem

CONTIGUOUS = "contiguous"
LAST = "channels last"
SAVE_MEMORY = "less memory"
OPACUS_VARIANTS = (CONTIGUOUS, LAST)
BACKPACK_VARIANTS = (CONTIGUOUS, LAST, SAVE_MEMORY, f"{SAVE_MEMORY}, {LAST}")


def _wrapped(problem: Problem, variant: str) -> tuple[nn.Module, Tensor]:
    model, x = problem.copied()
    model = wrapped(model)
    if LAST in variant:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    return model, x


def _of_bias(slopes: Tensor) -> Tensor:
    """Return the per-sample gradient [b, 1] of a scalar bias from that of its output [b, ...]."""
    return slopes.flatten(start_dim=1).sum(dim=1, keepdim=True)


def opacus(problem: Problem, lr: float, variant: str) -> Prepared:
    """Opacus' hooks (``GradSampleModule``); the scalars get a registered grad sampler."""
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
    """BackPACK's ``BatchGrad``; the scalars get an extension of their own."""
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
    """One step of ``LevenbergMarquardtModule``.

    It divides J J^T and r by b before it adds its damping to the diagonal, so its damping is alpha in the mean
    convention. No attempts: the step is taken as it is, without looking whether the loss fell.
    """
    from torch_levenberg_marquardt.damping import StandardDampingStrategy
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule

    model, x = problem.copied()
    y = problem.y
    module: Any = LevenbergMarquardtModule(
        model,
        damping_strategy=StandardDampingStrategy(starting_value=ALPHA),
        learning_rate=lr,
        attempts_per_step=0,
        solve_method="cholesky",
    )
    return Prepared(lambda: module.training_step(x, y), model)
