"""A small physics-informed DeepONet: from a function a to its integral u, u' = a and u(0) = 0, without solutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from problem import Problem, held_out, mlp, relative_error
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


class DeepONet(nn.Module):
    """A branch for the values of a at the sensors, a trunk for the place."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(len(SENSORS), 40, 30), mlp(1, 40, 30)

    def forward(self, values: Tensor, x: Tensor) -> Tensor:
        """Return u [b] for values [b, sensors] and places [b]."""
        return (self.branch(values) * self.trunk(x[:, None])).sum(dim=1)


def slope(u: Any, values: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """Return the residual of u' = a."""
    return jvp(lambda x: u(values, x), (x,), (torch.ones_like(x),))[1] - a


def start(u: Any, values: Tensor) -> Tensor:
    """Return the residual of u(0) = 0."""
    return u(values, torch.zeros(()).to(values))


def deeponet() -> Problem:
    """Return the problem."""
    test, where = 2 * held_out(2000, WAVES) - 1, held_out(2000)

    def sensed(c: Tensor) -> Tensor:
        return function(c[:, None, :], SENSORS.to(c))

    def draw() -> list[Term]:
        c, x = 2 * torch.rand(800, WAVES) - 1, torch.rand(800)
        return [Term(slope, sensed(c), x, function(c, x)), Term(start, sensed(c[:200]), weight=10.0)]

    def plot(model: nn.Module, axis: Any) -> None:
        x = torch.linspace(0, 1, 101)
        for c in test[:3]:
            every = c.expand(101, WAVES)
            (line,) = axis.plot(x, model(sensed(every), x).detach())
            axis.plot(x, integral(every, x), ":", color=line.get_color())
        axis.set(xlabel="x", ylabel="integral of a")

    return Problem(
        title="A physics-informed DeepONet",
        model=DeepONet,
        draw=draw,
        error=lambda model: relative_error(model(sensed(test), where), integral(test, where)),
        plot=plot,
        ggn={"alpha": 1e-5, "damping_warmup_steps": 30, "damping_warmup_factor": 1e2},
    )
