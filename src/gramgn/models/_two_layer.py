"""The two-layer network of the paper's theory (arXiv 1905.11675, section 3.2)."""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn

from gramgn.models._activations import Activation, activation_named
from gramgn.models._resnet import positive_int


class TwoLayer(nn.Module):
    """f(W, x) = (1 / sqrt M) a^T sigma(W x), of which only W is trained.

    The rows of W start as draws from N(0, I). The signs a, drawn uniformly from {-1, +1}, are a buffer: they are
    saved with the weights and never move. M d parameters.

    Args:
        in_features: d, the numbers in an input; the theory takes |x| = O(1). It must be given: None is what a
            configuration says of a data set that has no fixed number of features.
        width: M.
        activation: sigma: ``"erf"``, ``"tanh"``, ``"softplus"`` or ``"gelu"`` (the exact one), or ``"relu"``,
            whose derivative jumps: allowed, with a warning that the theorems do not cover it.

    Attributes:
        activation: The name of sigma.
        hidden: The linear layer that holds W [M, d], without a bias.
        signs: a [M].

    Raises:
        ValueError: Another activation, no ``in_features``, a size that is no whole number of at least 1, or one for
            which there is no memory.
    """

    batch_statistics: ClassVar[bool] = False

    def __init__(self, in_features: int | None = None, *, width: int = 1024, activation: str = "erf") -> None:
        super().__init__()
        if in_features is None:
            raise ValueError(
                "in_features must be given, and this data set has no fixed number of features (dataset=sphere and "
                "dataset=digits have): set model.in_features, or take a network for images"
            )
        self.width = positive_int("width", width)
        self.activation = activation
        if not self.sigma.smooth:
            warnings.warn(
                f"activation={activation} has no continuous derivative: the theorems on convergence do not "
                "cover it (erf, tanh, softplus and gelu are covered)",
                stacklevel=2,
            )
        try:
            self.hidden = nn.Linear(positive_int("in_features", in_features), width, bias=False)
        except RuntimeError as error:  # so torch tells that there is not the memory
            raise ValueError(
                f"width={width} with in_features={in_features} is {in_features * width:,} weights, for which there is "
                "no memory: take a smaller width"
            ) from error
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
