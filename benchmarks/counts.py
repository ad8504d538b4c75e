"""Operation counts: the multiply-adds that a step of Gram-Gauss-Newton needs beyond those of one of SGD.

SGD takes 3 F multiply-adds per sample: F for the forward pass, F each for the gradients of inputs and weights.
Our step forms per-sample gradients at the cost of the weights' gradient, and adds

- for parameters whose block of J is formed (convolutions, scalars): b m for the Gram product (half of it where
  only one triangle is formed) and m for J^T u;
- for a linear layer from i to o, (A A^T + 1) o (D D^T): b (i + o), and nothing for J^T u, which takes the place
  of the weight's gradient. The same for a convolution from i entries per place to o filters at T places where
  b T^2 (i + o) is less than b m.

The solve, b^2 / 3 per sample, is left out: it is below the rounding of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Counts:
    """Multiply-adds per sample.

    Attributes:
        forward: F, of the forward pass.
        factored: The part of F in layers whose block is never formed.
        gram: Of the whole Gram product, both triangles.
        update: Of J^T u beyond SGD's own work.
    """

    forward: float
    factored: float
    gram: float
    update: float

    @property
    def sgd(self) -> float:
        """3 F."""
        return 3 * self.forward

    @property
    def half(self) -> float:
        """Ours over SGD's with one triangle of the Gram product."""
        return 1 + (self.gram / 2 + self.update) / self.sgd

    @property
    def whole(self) -> float:
        """Ours over SGD's with both triangles."""
        return 1 + (self.gram + self.update) / self.sgd


def count_operations(model: nn.Module, x: Tensor) -> Counts:
    """Count the multiply-adds of convolutions and linear layers, by hooks in one forward pass.

    Args:
        model: The network.
        x: A batch [b, ...]; b enters the Gram product.
    """
    forward = factored = by_factors = 0.0
    in_factors = 0
    handles = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal forward, factored, by_factors, in_factors
        weight = layer.weight
        assert isinstance(weight, Tensor)
        places = math.prod(output.shape[2:]) if output.ndim > 2 else 1
        forward += weight.numel() * places
        pairs = places**2 * (weight[0].numel() + len(weight))
        if isinstance(layer, nn.Linear) or pairs < weight.numel():
            factored += weight.numel() * places
            by_factors += pairs
            in_factors += sum(param.numel() for param in layer.parameters())

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear)]
    for layer in layers:
        handles.append(layer.register_forward_hook(count))
    try:
        with torch.no_grad():
            model(x[:1])
    finally:
        for handle in handles:
            handle.remove()
    b = len(x)
    num_blocks = sum(param.numel() for param in model.parameters()) - in_factors
    return Counts(forward, factored, gram=b * (num_blocks + by_factors), update=num_blocks)
