"""A small physics-informed DeepONet: from a function a to its integral u, u' = a and u(0) = 0, without solutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from problem import HELD_OUT, Problem, fixed, mlp, relative_error
from torch import Tensor, nn
from torch.func import jvp

from gramgn import Term

WAVES = 5
SENSORS = torch.linspace(0, 1, 20, dtype=torch.float64)


def function(c: Tensor, x: Tensor) -> Tensor:
    """Return a(x) = sum_k c_k cos(k pi x) / k for coefficients [..., 5]."""
    k = torch.arange(1, WAVES + 1).to(c)
    return (c * torch.cos(k * math.pi * x[..., None]) / k).sum(dim=-1)


def integral(c: Tensor, x: Tensor) -> Tensor:
    """Return the integral of a from 0 to x."""
    k = torch.arange(1, WAVES + 1).to(c)
    return (c * torch.sin(k * math.pi * x[..., None]) / (k**2 * math.pi)).sum(dim=-1)


def sensed(c: Tensor) -> Tensor:
    """Return the values of a at the sensors, [b, 20]."""
    return function(c[:, None, :], SENSORS.to(c))


class DeepONet(nn.Module):
    """A branch for the values of a at the sensors, a trunk for the place."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(len(SENSORS), 40, 30), mlp(1, 40, 30)

    def forward(self, values: Tensor, x: Tensor) -> Tensor:
        """Return u [b] for values [b, 20] and places [b]."""
        return (self.branch(values) * self.trunk(x[:, None])).sum(dim=1)


def slope(u: Any, values: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """Return the residual of u' = a."""
    return jvp(lambda x: u(values, x), (x,), (torch.ones_like(x),))[1] - a


def start(u: Any, values: Tensor) -> Tensor:
    """Return the residual of u(0) = 0."""
    return u(values, torch.zeros(()).to(values))


def deeponet() -> Problem:
    """Return the problem; a step sees 800 functions at one place each."""

    def draw() -> list[Term]:
        c, x = 2 * torch.rand(800, WAVES) - 1, torch.rand(800)
        return [Term(slope, sensed(c), x, function(c, x)), Term(start, sensed(c[:200]), weight=10.0)]

    def error(model: nn.Module, points: int) -> float:
        given = fixed(points, 5000, WAVES + 1)
        c, x = 2 * given[:, :WAVES] - 1, given[:, WAVES]
        return relative_error(model(sensed(c), x), integral(c, x))

    def plot(model: nn.Module, axis: Any) -> None:
        x = torch.linspace(0, 1, 101)
        for c in 2 * fixed(HELD_OUT, 4, WAVES) - 1:
            every = c.expand(101, WAVES)
            axis.plot(x, model(sensed(every), x).detach())
            axis.plot(x, integral(every, x), "k:")
        axis.set(xlabel="x", title="integrals of four functions (dotted: exact)")

    return Problem(
        title="A physics-informed DeepONet",
        model=DeepONet,
        draw=draw,
        error=error,
        plot=plot,
    )
