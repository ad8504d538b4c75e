"""Poisson's equation on the unit cube with values on its surface; the solution is the sum of cos(pi x_i)."""

from __future__ import annotations

from typing import Any

import torch
from problem import Problem, fixed, mlp, relative_error
from torch import Tensor, nn

from gramgn import Term
from gramgn.physics import laplacian, points_in_box, points_on_box


def solution(x: Tensor) -> Tensor:
    """Return u at points [..., d]."""
    return torch.cos(torch.pi * x).sum(dim=-1)


def interior(u: Any, x: Tensor) -> Tensor:
    """Return the residual of the equation at one point."""
    return laplacian(u, x)[0] + torch.pi**2 * solution(x)


def surface(u: Any, x: Tensor) -> Tensor:
    """Return the residual on the surface."""
    return u(x)[0] - solution(x)


def poisson(dimension: int, num_interior: int, num_surface: int) -> Problem:
    """Return the problem in some dimension."""
    low, high = [0.0] * dimension, [1.0] * dimension

    def draw() -> list[Term]:
        return [
            Term(interior, points_in_box(num_interior, low, high)),
            Term(surface, points_on_box(num_surface, low, high)),
        ]

    def error(model: nn.Module, points: int) -> float:
        x = fixed(points, 10_000, dimension)
        return relative_error(model(x)[:, 0], solution(x))

    def plot(model: nn.Module, axis: Any) -> None:
        x = torch.linspace(0, 1, 101)
        first, second = torch.meshgrid(x, x, indexing="xy")
        points = torch.full((101, 101, dimension), 0.5)
        points[..., 0], points[..., 1] = first, second
        wrong = (model(points)[..., 0] - solution(points)).abs().detach()
        axis.figure.colorbar(axis.pcolormesh(x, x, wrong), ax=axis)
        others = "" if dimension == 2 else ", the others 1/2"
        axis.set(xlabel=f"$x_1${others}", ylabel="$x_2$", title="|error|")

    return Problem(
        title=f"Poisson's equation in {dimension} dimensions",
        model=lambda: mlp(dimension, 64, 64, 1),
        draw=draw,
        error=error,
        plot=plot,
    )
