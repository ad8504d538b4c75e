"""What is rejected before any work is done, because the result could not be right."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gramgn.optim.runtime import float64_home

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_model(model: nn.Module) -> None:
    """Reject everything but a plain module: compiled, scripted or wrapped for several devices."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the network itself, not "
            "model.parameters(); several networks as an nn.ModuleList or nn.ModuleDict"
        )
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if compiled or isinstance(model, (torch.jit.ScriptModule, *WRAPPERS)):
        raise ValueError(
            f"model is a {type(model).__name__} that is compiled, scripted or wrapped for several devices; "
            "per-sample Jacobians need the plain module: pass the network as it was before torch.compile, "
            "torch.jit or the wrapper. On several processes the optimizer itself exchanges what the step needs"
        )
    check_not_sharded(model)
    check_batch_statistics(model)


def check_not_sharded(model: nn.Module) -> None:
    """Reject networks of whose parameters this process holds a shard only."""
    for name, module in model.named_modules():
        sharded = type(module).__name__ == "FullyShardedDataParallel"
        if sharded or any(hasattr(param, "placements") for param in module.parameters(recurse=False)):
            raise ValueError(
                f"the parameters of '{name or 'the model'}' are divided among processes (FSDP or DTensor), and the "
                "rows of J need all of them: pass the plain network, whole on each process, without fully_shard, FSDP "
                "and parallelize_module; the optimizer divides J itself"
            )


def check_batch_statistics(model: nn.Module) -> None:
    """Reject layers whose output for one sample depends on the other samples of the batch."""
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
                "to use. Replace it with GroupNorm or LayerNorm, which normalise inside each sample (among the "
                "networks of this package: ResNetFixup, ResNetGN), or freeze its statistics with .eval() of the "
                "normalisation layers"
            )


def check_modes(device: torch.device) -> None:
    """Reject mixed precision, which would shorten J and the Gram product, and inference mode."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode is on, so nothing can be differentiated: step outside of it")
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            "autocast is on: mixed precision would ruin the small eigenvalues of G = J J^T. Build the "
            "optimizer and call its step, closure included, outside of torch.autocast"
        )


def note_device(device: torch.device) -> None:
    """Warn if the system is not solved on the device of the network."""
    if float64_home(device) != device:
        warnings.warn(
            f"GramGaussNewton: {device.type} has no float64, so G is summed and solved on the CPU",
            stacklevel=3,
        )


def check_parameters(params: Mapping[str, Tensor]) -> None:
    """Reject parameters that are uninitialised, not in float32 or float64, or on several devices."""
    for name, param in params.items():
        if nn.parameter.is_lazy(param):
            raise ValueError(f"parameter '{name}' has no shape yet: call the model on one batch first")
        if not param.is_floating_point():
            advice = (
                ": hold its real and imaginary parts in one real parameter [..., 2] and compute with "
                "torch.view_as_complex(parameter)"
                if param.is_complex()
                else ""
            )
            raise ValueError(
                f"parameter '{name}' is {param.dtype}: only real floating point parameters can be trained{advice}"
            )
        if torch.finfo(param.dtype).eps > torch.finfo(torch.float32).eps:
            raise ValueError(
                f"parameter '{name}' is {param.dtype}, in which J would lose the small eigenvalues of G = J J^T: "
                "train it in float32, model.float(), with inputs alike; to form J by autocast to bfloat16, pass "
                "engine=Stream(jacobian_dtype='bfloat16')"
            )
    devices = sorted({str(param.device) for param in params.values()})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on several devices ({', '.join(devices)}): move the model to one"
        )


def check_graph(output: Tensor, *, short: bool) -> float:
    """Reject a graph that computes in half precision or with batch statistics, or whose gradients are no derivatives.

    Args:
        output: The output with its graph.
        short: Whether a shorter format was asked for.

    Returns:
        The relative precision of the least precise format in the graph.
    """
    dtypes, seen, stack = {output.dtype}, set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_saved_scale_grad_by_freq", False):
            raise ValueError(
                "an embedding with scale_grad_by_freq=True divides its gradients by the counts of its entries in the "
                "batch, so they are no derivatives: set scale_grad_by_freq=False"
            )
        if getattr(node, "_saved_training", False) and len(getattr(node, "_saved_input", ())) > 1:
            raise ValueError(
                "the network normalises by the statistics of the batch (batch_norm with training=True): an output then "
                "depends on the other samples. Normalise inside each sample (group_norm, layer_norm), or freeze the "
                "statistics"
            )
        dtypes |= {result.dtype for result in node._input_metadata}
        stack += [after for after, _ in node.next_functions]
    precisions = {torch.finfo(dtype).eps: dtype for dtype in dtypes if dtype.is_floating_point}
    coarsest = max(precisions, default=0.0)
    if coarsest > torch.finfo(torch.float32).eps and not short:
        raise ValueError(
            f"the network computes in {precisions[coarsest]} inside its forward, in which J would lose the small "
            "eigenvalues of G = J J^T: compute in float32, without autocast and conversions; to form J by autocast to "
            "bfloat16, pass engine=Stream(jacobian_dtype='bfloat16')"
        )
    return coarsest
