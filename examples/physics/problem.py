"""What an example is: a network, the terms of a step, and an error on points that no optimizer sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gramgn import Term

VALIDATION, HELD_OUT = 1, 2
"""The points on which settings are chosen, and those on which the chosen ones are judged: seeds of `fixed`."""


@dataclass(frozen=True)
class Problem:
    """A problem that every optimizer solves from the same start, with the same terms.

    Attributes:
        title: Title of the picture.
        model: Returns a new network.
        draw: Returns the terms of one step; points are drawn with torch's random numbers.
        error: Returns the relative error of a network on the points `VALIDATION` or `HELD_OUT`.
        plot: Draws the trained network into an axis of matplotlib.
    """

    title: str
    model: Callable[[], nn.Module]
    draw: Callable[[], Sequence[Term]]
    error: Callable[[nn.Module, int], float]
    plot: Callable[[nn.Module, Any], None]


def mlp(*widths: int) -> nn.Sequential:
    """Return a network with tanh between linear layers of these widths."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return |found - exact| / |exact|."""
    return float(torch.linalg.vector_norm(found.detach() - exact) / torch.linalg.vector_norm(exact))


def fixed(seed: int, *shape: int) -> Tensor:
    """Return numbers that are uniform in [0, 1], the same in each run."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
