"""The heat equation u_t = kappa u_xx in one dimension, and kappa recovered from noisy values of its solution."""

from __future__ import annotations

import math
from typing import Any

import torch
from problem import Problem, held_out, mlp, relative_error
from torch import Tensor, nn

from gramgn import Term
from gramgn.physics import gradient, points_in_box

KAPPA = 0.25
NOISE = 0.01


def solution(x: Tensor) -> Tensor:
    """Return u at points (x, t) [..., 2]: two decaying waves, 0 at both ends."""
    place, time = x[..., 0], x[..., 1]

    def wave(number: int) -> Tensor:
        return torch.exp(-KAPPA * (number * math.pi) ** 2 * time) * torch.sin(number * math.pi * place)

    return wave(1) + 0.5 * wave(3)


def equation(u: Any, x: Tensor, kappa: Tensor | float) -> Tensor:
    """Return u_t - kappa u_xx at one point."""
    slopes = gradient(u, x)
    curvature = gradient(lambda x: gradient(u, x)[0], x)[0]
    return slopes[1] - kappa * curvature


def forward(u: Any, x: Tensor) -> Tensor:
    """Return the residual for the known coefficient."""
    return equation(u, x, KAPPA)


def value(u: Any, x: Tensor, given: Tensor) -> Tensor:
    """Return the residual of a given value."""
    return u(x)[0] - given


class Unknown(nn.Module):
    """A network, and the logarithm of the coefficient that is sought."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_kappa = mlp(2, 32, 32, 1), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return u [b, 1]."""
        return self.net(x)


def inverse(u: Any, x: Tensor) -> Tensor:
    """Return the residual for the sought coefficient."""
    return equation(u, x, u.log_kappa.exp())


def plot(model: nn.Module, axis: Any) -> None:
    """Draw the solution at some times, exact ones dotted."""
    x = torch.linspace(0, 1, 201)
    for time in (0.0, 0.1, 0.3, 1.0):
        points = torch.stack([x, torch.full_like(x, time)], dim=1)
        (line,) = axis.plot(x, model(points)[:, 0].detach(), label=f"t = {time:g}")
        axis.plot(x, solution(points), ":", color=line.get_color())
    axis.set(xlabel="x", ylabel="u")
    axis.legend()


def heat() -> Problem:
    """Return the equation with a known coefficient."""
    test = held_out(10_000, 2)

    def draw() -> list[Term]:
        start, ends = points_in_box(100, [0, 0], [1, 1]), points_in_box(100, [0, 0], [1, 1])
        start[:, 1], ends[:, 0] = 0.0, ends[:, 0].round()
        return [
            Term(forward, points_in_box(400, [0, 0], [1, 1])),
            Term(value, start, solution(start), weight=10.0),
            Term(value, ends, solution(ends) * 0, weight=10.0),
        ]

    return Problem(
        title="The heat equation",
        model=lambda: mlp(2, 64, 64, 1),
        draw=draw,
        error=lambda model: relative_error(model(test)[:, 0], solution(test)),
        plot=plot,
        ggn={"alpha": 1e-6, "damping_warmup_steps": 40, "damping_warmup_factor": 1e3},
    )


def coefficient() -> Problem:
    """Return the inverse problem: 200 values of u with noise of one hundredth, kappa unknown."""
    places = held_out(200, 2)
    noise = NOISE * torch.randn(200, generator=torch.Generator().manual_seed(7))
    measured = solution(places) + noise

    def draw() -> list[Term]:
        return [
            Term(inverse, points_in_box(300, [0, 0], [1, 1])),
            Term(value, places, measured, weight=10.0),
        ]

    return Problem(
        title="A coefficient from noisy data",
        model=Unknown,
        draw=draw,
        error=lambda model: abs(float(model.log_kappa.detach().exp()) / KAPPA - 1),
        plot=plot,
        ggn={"alpha": 1e-5, "damping_warmup_steps": 40, "damping_warmup_factor": 1e2},
    )
