"""Energies and forces of four Lennard-Jones points in space, learned from 600 configurations."""

from __future__ import annotations

from typing import Any

import torch
from problem import HELD_OUT, Problem, fixed, mlp, relative_error
from torch import Tensor, nn
from torch.func import grad, vmap

from gramgn import Term

NEIGHBOURS = torch.tensor([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])


def distances(at: Tensor) -> Tensor:
    """Return the distances [..., 4, 3] of each point to its neighbours for places [..., 4, 3]."""
    away = at[..., :, None, :] - at[..., NEIGHBOURS, :]
    return torch.linalg.vector_norm(away, dim=-1)


def energy(at: Tensor) -> Tensor:
    """Return the sum over pairs of 4 (r^-12 - r^-6)."""
    power = distances(at) ** -6
    return 2 * (power**2 - power).sum(dim=(-1, -2))


def configurations(seed: int, number: int) -> Tensor:
    """Return places [number, 4, 3]: a tetrahedron near rest, each coordinate shaken by up to 0.1."""
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) * 1.12 / 8**0.5
    return corners + 0.2 * (fixed(seed, number, 4, 3) - 0.5)


class Atoms(nn.Module):
    """The energy as a sum over points of a network of a sum over the neighbours of another network of the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.point = mlp(1, 32, 16), mlp(16, 32, 1)

    def forward(self, at: Tensor) -> Tensor:
        """Return the energy [b] of configurations [b, 4, 3]."""
        # Inverse distances are 0.9 on average, with a standard deviation of 0.06.
        inverse = (distances(at).reciprocal() - 0.9) / 0.06
        neighbours = self.pair(inverse[..., None]).sum(dim=-2)
        return self.point(neighbours).sum(dim=(-1, -2))


def energies(u: Any, at: Tensor, given: Tensor) -> Tensor:
    """Return the residual of the energy."""
    return u(at) - given


def forces(u: Any, at: Tensor, given: Tensor) -> Tensor:
    """Return the residuals of the 12 derivatives of the energy by the places."""
    return (grad(u)(at) - given).flatten()


def lennard_jones() -> Problem:
    """Return the problem; a step sees 60 of 600 configurations, 60 + 720 rows."""
    train = configurations(3, 600)
    slopes = vmap(grad(energy))
    # The network learns the energy relative to its mean, in units in which forces have the mean square 1.
    mean, unit = energy(train).mean(), slopes(train).square().mean().sqrt()
    of_train, on_train = (energy(train) - mean) / unit, slopes(train) / unit

    def draw() -> list[Term]:
        some = torch.randperm(len(train))[:60]
        return [
            Term(energies, train[some], of_train[some]),
            Term(forces, train[some], on_train[some]),
        ]

    def learned(model: nn.Module, at: Tensor) -> Tensor:
        return unit * vmap(grad(lambda at: model(at[None])[0]))(at)

    def error(model: nn.Module, points: int) -> float:
        at = configurations(points, 1000)
        return relative_error(learned(model, at), slopes(at))

    def plot(model: nn.Module, axis: Any) -> None:
        at = configurations(HELD_OUT, 1000)
        exact = slopes(at)
        axis.scatter(exact.flatten(), (learned(model, at).detach() - exact).flatten(), s=1)
        axis.set(xlabel="derivative of the energy", title="error of the derivative")

    return Problem(
        title="Energies and forces of Lennard-Jones points",
        model=Atoms,
        draw=draw,
        error=error,
        plot=plot,
    )
