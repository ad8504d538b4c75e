"""What is refused, before any work, because the result could not be right."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gramgn.optim._precision import float64_home

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_process() -> None:
    """Refuse to run as one of several processes, which would each take their own step."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (world_size.isdigit() and int(world_size) > 1) or (
        distributed and torch.distributed.get_world_size() > 1
    ):
        raise RuntimeError(
            "GramGaussNewton runs in one process, but this one is part of several "
            f"(WORLD_SIZE={world_size}): start it without torchrun, or unset WORLD_SIZE"
        )


def check_model(model: nn.Module) -> None:
    """Refuse what is no plain module: compiled, scripted or wrapped for several devices."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if compiled or isinstance(model, (torch.jit.ScriptModule, *WRAPPERS)):
        raise ValueError(
            f"model is a {type(model).__name__} that is compiled, scripted or wrapped for several devices; "
            "per-sample Jacobians need the plain module: pass the network as it was before torch.compile, "
            "torch.jit or the wrapper"
        )
    check_batch_statistics(model)


def check_batch_statistics(model: nn.Module) -> None:
    """Refuse layers whose output for one sample depends on the other samples of the batch."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            offends = module.training or module.running_mean is None
        else:
            offends = (
                isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None
            )
        if offends:
            raise ValueError(
                f"{type(module).__name__} at '{name}' uses the statistics of the batch: an output then "
                "depends on the other samples, and there is no Jacobian of one sample for Gram-Gauss-Newton "
                "to use. Take ResNetFixup or ResNetGN (any network that normalises inside each sample), or "
                "freeze the statistics by model.eval()"
            )


def check_modes(device: torch.device) -> None:
    """Refuse mixed precision, which would shorten J and the Gram product, and inference mode."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode is on, so nothing can be differentiated: step outside of it")
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            "autocast is on: mixed precision would ruin the small eigenvalues of G = J J^T. Build the "
            "optimizer and call its step, closure included, outside of torch.autocast"
        )


def note_device(device: torch.device) -> None:
    """Tell where the solve runs if that is not where the network is."""
    if float64_home(device) != device:
        warnings.warn(
            f"GramGaussNewton: {device.type} has no float64, so G is summed and solved on the CPU",
            stacklevel=3,
        )


def check_parameters(params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that are uninitialised, not real floating point, or on several devices."""
    for name, param in params.items():
        if nn.parameter.is_lazy(param):
            raise ValueError(f"parameter '{name}' has no shape yet: call the model on one batch first")
        if not param.is_floating_point():
            raise ValueError(
                f"parameter '{name}' is {param.dtype}: only real floating point parameters can be trained"
            )
    devices = sorted({str(param.device) for param in params.values()})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on several devices ({', '.join(devices)}): move the model to one"
        )


def check_residual(residual: Any, output: Tensor, num_samples: int) -> None:
    """Refuse anything but the residuals of the batch that the model was called with.

    Args:
        residual: What the closure returned.
        output: What the model returned inside of it, [b, ...].
        num_samples: b, the number of samples the model was called with.

    Raises:
        ValueError: Not a tensor [b] or [b, k] that depends on the output.
    """
    if not isinstance(residual, Tensor):
        raise ValueError(f"the closure must return the residuals as a tensor, got {type(residual).__name__}")
    given, returned = list(output.shape), list(residual.shape)
    shapes = f"the model returned {given} for {num_samples} samples, the closure {returned}"
    if residual.ndim == 0:
        raise ValueError(
            f"the closure must return the residuals, f - y for each sample, not a loss: {shapes}"
        )
    if residual.ndim > 2 or residual.shape[0] != num_samples:
        raise ValueError(f"residuals must have shape [b] or [b, k] with b = {num_samples}: {shapes}")
    per_sample = output.numel() // num_samples
    if residual.ndim == 2 and residual.shape[1] > per_sample:
        # [b, 1] - [b] broadcasts to [b, b]; and more residuals than outputs make G singular anyway.
        raise ValueError(
            f"more residuals than outputs: {shapes}. Output and target probably have shapes that broadcast "
            "(such as [b, 1] and [b]): give both the same shape"
        )
    if not residual.requires_grad:
        raise ValueError(
            "the residuals do not depend on the model's output through autograd: return f - y from the "
            "closure, without detach, item, numpy or torch.no_grad"
        )


def check_logits(returned: Any, output: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return logits [b, k] and labels [b], int64, refusing anything else.

    Args:
        returned: What the closure returned.
        output: What the model returned inside of it, [b, ...].
        num_samples: b, the number of samples the model was called with.

    Raises:
        ValueError: Not a pair of floating point logits that depend on the output and whole labels in range.
    """
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not pair or not all(isinstance(part, Tensor) for part in returned):
        raise ValueError(
            "with loss='cross_entropy' the closure must return a pair of tensors (logits [b, k], labels [b]), "
            f"got {type(returned).__name__}"
        )
    logits, labels = returned
    shapes = f"logits {list(logits.shape)}, labels {list(labels.shape)}, {num_samples} samples"
    if logits.ndim != 2 or logits.shape[0] != num_samples or logits.shape[1] < 2:
        raise ValueError(f"logits must have shape [b, k] with k >= 2 classes: {shapes}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be whole numbers [b], one for each sample: {shapes}, {labels.dtype}")
    if not logits.requires_grad:
        raise ValueError(
            "the logits do not depend on the model's output through autograd: return them from the closure "
            "without detach, numpy or torch.no_grad"
        )
    if bool(((labels < 0) | (labels >= logits.shape[1])).any()):
        raise ValueError(
            f"labels must lie in 0 to {logits.shape[1] - 1}, one less than the number of logits; got "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    return logits, labels.to(logits.device, torch.int64)
