"""The two-layer network of the paper's theory (arXiv 1905.11675, section 3.2) and its activations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gramgn.models.resnet import positive_int

ROOT_2 = math.sqrt(2)
ROOT_2_PI = math.sqrt(2 * math.pi)
# Below this softplus is computed in full: torch's own 20 would be wrong by 2e-9, far above float64 rounding.
SOFTPLUS_LINEAR_ABOVE = 40.0


@dataclass(frozen=True)
class Activation:
    """An activation sigma and its derivative in closed form, elementwise.

    Attributes:
        name: As in a configuration.
        function: sigma.
        derivative: sigma'; 0 at a kink.
        smooth: Whether sigma' is continuous and Lipschitz, which both theorems assume.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    smooth: bool = True


def _softplus(z: Tensor) -> Tensor:
    return nn.functional.softplus(z, threshold=SOFTPLUS_LINEAR_ABOVE)


def _gelu_derivative(z: Tensor) -> Tensor:
    """Return Phi(z) + z phi(z)."""
    return (1 + torch.erf(z / ROOT_2)) / 2 + z * torch.exp(-z.square() / 2) / ROOT_2_PI


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("erf", torch.erf, lambda z: 2 / math.sqrt(math.pi) * torch.exp(-z.square())),
        Activation("tanh", torch.tanh, lambda z: 1 - torch.tanh(z).square()),
        Activation("softplus", _softplus, torch.sigmoid),
        Activation("gelu", nn.functional.gelu, _gelu_derivative),
        Activation("relu", torch.relu, lambda z: (z > 0).to(z.dtype), smooth=False),
    )
}


def activation_named(name: str) -> Activation:
    """Return the activation called `name`.

    Raises:
        ValueError: There is no such activation; the message lists all.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


class TwoLayer(nn.Module):
    """f(W, x) = (1 / sqrt M) a^T sigma(W x), of which only W is trained.

    The rows of W start as draws from N(0, I). The signs a, drawn uniformly from {-1, +1}, are a buffer: they are
    saved with the weights and never move. The network has M d parameters.

    Args:
        in_features: d, the number of features of an input; the theory takes |x| = O(1). Required: None is what
            the configuration passes for a data set without a fixed number of features.
        width: M.
        activation: sigma: `"erf"`, `"tanh"`, `"softplus"`, `"gelu"` (the exact one), or `"relu"`, whose
            derivative jumps: allowed, with a warning that the theorems do not cover it.

    Attributes:
        activation: The name of sigma.
        hidden: The linear layer that holds W [M, d], without a bias.
        signs: a [M].

    Raises:
        ValueError: The activation is unknown, `in_features` is missing, or a size is not a whole number of at
            least 1.
    """

    batch_statistics: ClassVar[bool] = False

    def __init__(self, in_features: int | None = None, *, width: int = 1024, activation: str = "erf") -> None:
        super().__init__()
        if in_features is None:
            raise ValueError(
                "in_features must be given, and this data set has no fixed number of features (dataset=sphere and "
                "dataset=digits have): set model.in_features, or choose a network for images"
            )
        self.width = positive_int("width", width)
        self.activation = activation
        if not self.sigma.smooth:
            warnings.warn(
                f"activation={activation} has no continuous derivative: the theorems on convergence do not "
                "cover it (erf, tanh, softplus and gelu are covered)",
                stacklevel=2,
            )
        self.hidden = nn.Linear(positive_int("in_features", in_features), width, bias=False)
        nn.init.normal_(self.hidden.weight)
        self.signs: Tensor
        self.register_buffer("signs", 2.0 * torch.randint(0, 2, (width,)) - 1.0)

    @property
    def sigma(self) -> Activation:
        """The activation and its derivative."""
        return activation_named(self.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors [b, d] to outputs [b]."""
        if x.ndim != 2 or x.shape[1] != self.hidden.in_features:
            raise ValueError(
                f"{type(self).__name__} takes vectors [b, {self.hidden.in_features}], got {list(x.shape)}; "
                "set in_features to the number of features of the data (dataset=sphere and digits are vectors)"
            )
        return self.sigma.function(self.hidden(x)) @ self.signs / math.sqrt(self.width)

    def extra_repr(self) -> str:
        """Describe the network in its repr."""
        return f"activation={self.activation}"
