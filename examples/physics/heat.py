"""The heat equation u_t = kappa u_xx in one dimension, and kappa recovered from noisy values of its solution."""

from __future__ import annotations

import math
from typing import Any

import torch
from problem import VALIDATION, Problem, fixed, mlp, relative_error
from torch import Tensor, nn

from gramgn import Term
from gramgn.physics import gradient, points_in_box

KAPPA = 0.25
NOISE = 0.001


def solution(x: Tensor) -> Tensor:
    """Return u at points (x, t) [..., 2]: a decaying wave, 0 at both ends."""
    return torch.exp(-KAPPA * math.pi**2 * x[..., 1]) * torch.sin(math.pi * x[..., 0])


def equation(u: Any, x: Tensor, kappa: Tensor | float) -> Tensor:
    """Return u_t - kappa u_xx at one point."""
    slopes = gradient(u, x)
    curvature = gradient(lambda x: gradient(u, x)[0], x)[0]
    return slopes[1] - kappa * curvature


def value(u: Any, x: Tensor, given: Tensor) -> Tensor:
    """Return the residual of a given value."""
    return u(x)[0] - given


def heat() -> Problem:
    """Return the equation with a known coefficient."""

    def known(u: Any, x: Tensor) -> Tensor:
        return equation(u, x, KAPPA)

    def draw() -> list[Term]:
        start, ends = points_in_box(100, [0, 0], [1, 1]), points_in_box(100, [0, 0], [1, 1])
        start[:, 1], ends[:, 0] = 0.0, ends[:, 0].round()
        return [
            Term(known, points_in_box(400, [0, 0], [1, 1])),
            Term(value, start, solution(start)),
            Term(value, ends, torch.zeros(100)),
        ]

    return Problem(
        title="The heat equation",
        model=lambda: mlp(2, 64, 64, 1),
        draw=draw,
        error=error_of_u,
        plot=plot,
    )


class Unknown(nn.Module):
    """A network, and the logarithm of the coefficient that is sought."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_kappa = mlp(2, 32, 32, 1), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return u [b, 1]."""
        return self.net(x)


def coefficient() -> Problem:
    """Return the inverse problem: 200 values of u with noise of one thousandth, kappa and u unknown."""
    places = fixed(3, 200, 2)
    measured = solution(places) + NOISE * torch.randn(200, generator=torch.Generator().manual_seed(4))

    def sought(u: Any, x: Tensor) -> Tensor:
        return equation(u, x, u.log_kappa.exp())

    def draw() -> list[Term]:
        return [
            Term(sought, points_in_box(300, [0, 0], [1, 1])),
            Term(value, places, measured),
        ]

    def error(model: Any, points: int) -> float:
        of_kappa = abs(float(model.log_kappa.detach().exp()) / KAPPA - 1)
        # Nobody knows kappa when settings are chosen.
        return max(error_of_u(model, points), 0.0 if points == VALIDATION else of_kappa)

    return Problem(
        title="A coefficient from noisy data",
        model=Unknown,
        draw=draw,
        error=error,
        plot=plot,
    )


def error_of_u(model: nn.Module, points: int) -> float:
    """Return the relative error of u."""
    x = fixed(points, 10_000, 2)
    return relative_error(model(x)[:, 0], solution(x))


def plot(model: nn.Module, axis: Any) -> None:
    """Draw the solution at some times, exact ones dotted."""
    x = torch.linspace(0, 1, 201)
    for time in (0.0, 0.1, 0.3, 1.0):
        points = torch.stack([x, torch.full_like(x, time)], dim=1)
        axis.plot(x, model(points)[:, 0].detach(), label=f"t = {time:g}")
        axis.plot(x, solution(points), "k:")
    axis.set(xlabel="x", title="u (dotted: exact)")
    axis.legend()
