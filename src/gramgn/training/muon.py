"""Muon for the hidden weight matrices and AdamW for the rest, by the package pytorch-optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from gramgn.errors import ConfigError


def muon_with_adamw(
    params: Iterable[Tensor],
    *,
    lr: float = 0.02,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
    first_and_last: Literal["adamw", "muon"] = "adamw",
    adamw_lr: float = 3e-4,
    adamw_betas: Sequence[float] = (0.9, 0.95),
    adamw_eps: float = 1e-10,
    adamw_weight_decay: float = 0.0,
) -> Optimizer:
    """Return an optimizer that orthogonalises the momentum of the hidden weight matrices (Muon).

    Muon is that of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): a kernel
    [out, in, h, w] is flattened to [out, in h w], its Nesterov momentum is orthogonalised by Newton-Schulz steps in
    bfloat16, and lr is scaled by sqrt(max(1, out / (in h w))). `torch.optim.Muon` rejects kernels. Both parameter
    groups have an `lr`; that of Muon is in the first, and schedulers scale both.

    Args:
        params: The network's parameters in their order, which determines, with their shapes, who gets which.
        lr: Learning rate of the matrices.
        momentum: Momentum of the matrices.
        nesterov: Look ahead by one momentum step.
        ns_steps: Number of Newton-Schulz steps.
        weight_decay: Decoupled weight decay of the matrices.
        first_and_last: The optimizer of the first and the last parameter of two or more dimensions: the input and
            the output layer, which Jordan et al. leave to AdamW.
        adamw_lr: Learning rate of everything else: biases, scales, norms.
        adamw_betas: AdamW's two decay rates.
        adamw_eps: AdamW's epsilon.
        adamw_weight_decay: AdamW's decoupled weight decay.

    Raises:
        ConfigError: The package is missing, a number is out of range, or no parameter is left to Muon.
    """
    try:
        from pytorch_optimizer import Muon
    except ImportError as error:
        raise ConfigError(
            f"Muon needs the package pytorch-optimizer ({error}): python -m pip install pytorch-optimizer "
            'installs it, as does the extra "muon" of this package; or choose another optimizer'
        ) from error
    numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    numbers |= {"adamw_lr": adamw_lr, "adamw_eps": adamw_eps, "adamw_weight_decay": adamw_weight_decay}
    for name, number in numbers.items():
        if not (math.isfinite(number) and number >= 0):
            raise ConfigError(f"optimizer.{name}={number!r} must be a finite number of at least 0")
    matrices, others = split_for_muon(params, first_and_last)
    if not matrices:
        raise ConfigError(
            "Muon has nothing to do: the network has no weight matrix or kernel between its first and its last "
            "one. Use optimizer=adamw, or optimizer.first_and_last=muon"
        )
    beta1, beta2 = adamw_betas
    return Muon(
        [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}],
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        weight_decay=weight_decay,
        adamw_lr=adamw_lr,
        adamw_betas=(beta1, beta2),
        adamw_eps=adamw_eps,
        adamw_wd=adamw_weight_decay,
    )


def split_for_muon(
    params: Iterable[Tensor], first_and_last: Literal["adamw", "muon"] = "adamw"
) -> tuple[list[Tensor], list[Tensor]]:
    """Split parameters into those for Muon and those for AdamW, each in the order given.

    Muon gets the weight matrices and kernels (two or more dimensions), the first and the last of them only
    with `first_and_last="muon"`. Frozen parameters are treated as all others.
    """
    params = list(params)
    shaped = [index for index, parameter in enumerate(params) if parameter.ndim >= 2]
    chosen = set(shaped if first_and_last == "muon" else shaped[1:-1])
    matrices = [parameter for index, parameter in enumerate(params) if index in chosen]
    others = [parameter for index, parameter in enumerate(params) if index not in chosen]
    return matrices, others
