"""What an example is: a network, the terms of a step, and an error on held-out points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gramgn import Term

Plot = Callable[[nn.Module, Any], None]


@dataclass(frozen=True)
class Problem:
    """A problem that every optimizer solves from the same start, with the same terms.

    Attributes:
        title: Of the picture.
        model: Returns a new network.
        draw: Returns the terms of one step; points are drawn with torch's random numbers.
        error: Returns the relative error on held-out points.
        plot: Draws the trained network into an axis of matplotlib.
        ggn: Options of `GramGaussNewton` besides those that all examples share.
    """

    title: str
    model: Callable[[], nn.Module]
    draw: Callable[[], Sequence[Term]]
    error: Callable[[nn.Module], float]
    plot: Plot
    ggn: dict[str, Any] = field(default_factory=dict)


def mlp(*widths: int) -> nn.Sequential:
    """Return a network with tanh between linear layers of these widths."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return |found - exact| / |exact|."""
    return float(torch.linalg.vector_norm(found.detach() - exact) / torch.linalg.vector_norm(exact))


def held_out(*shape: int) -> Tensor:
    """Return points in the unit cube that no optimizer sees, the same in each run."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(123456))
