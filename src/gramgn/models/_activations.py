"""Activations of the two-layer network with their derivatives, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROOT_2 = math.sqrt(2)
ROOT_2_PI = math.sqrt(2 * math.pi)
# Below this softplus is computed in full: torch's own 20 would be wrong by 2e-9, far above float64 rounding.
SOFTPLUS_LINEAR_ABOVE = 40.0


@dataclass(frozen=True)
class Activation:
    """sigma and sigma', elementwise.

    Attributes:
        name: As in a configuration.
        function: sigma.
        derivative: sigma'; at a kink 0.
        smooth: Whether sigma' is continuous and Lipschitz, which both theorems assume.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    smooth: bool = True


def _softplus(z: Tensor) -> Tensor:
    return nn.functional.softplus(z, threshold=SOFTPLUS_LINEAR_ABOVE)


def _erf_derivative(z: Tensor) -> Tensor:
    return 2 / math.sqrt(math.pi) * torch.exp(-z.square())


def _tanh_derivative(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


def _gelu_derivative(z: Tensor) -> Tensor:
    """Return Phi(z) + z phi(z)."""
    return (1 + torch.erf(z / ROOT_2)) / 2 + z * torch.exp(-z.square() / 2) / ROOT_2_PI


def _relu_derivative(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("erf", torch.erf, _erf_derivative),
        Activation("tanh", torch.tanh, _tanh_derivative),
        Activation("softplus", _softplus, torch.sigmoid),
        Activation("gelu", nn.functional.gelu, _gelu_derivative),
        Activation("relu", torch.relu, _relu_derivative, smooth=False),
    )
}


def activation_named(name: str) -> Activation:
    """Return the activation called ``name``.

    Raises:
        ValueError: There is none; the message lists all.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
