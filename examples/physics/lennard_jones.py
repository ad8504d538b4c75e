"""Energies and forces of four Lennard-Jones points in space, learned from 600 configurations."""

from __future__ import annotations

from typing import Any

import torch
from problem import Problem, mlp, relative_error
from torch import Tensor, nn
from torch.func import grad, vmap

from gramgn import Term

POINTS = 4
PAIRS = tuple(torch.triu_indices(POINTS, POINTS, 1))


def distances(at: Tensor) -> Tensor:
    """Return the distances [..., pairs] of points [..., 4, 3]."""
    away = at[..., PAIRS[0], :] - at[..., PAIRS[1], :]
    return torch.linalg.vector_norm(away, dim=-1)


def energy(at: Tensor) -> Tensor:
    """Return the sum over pairs of 4 (r^-12 - r^-6)."""
    power = distances(at) ** -6
    return 4 * (power**2 - power).sum(dim=-1)


def force(at: Tensor) -> Tensor:
    """Return the derivative of the energy by the places [b, 4, 3]."""
    return vmap(grad(energy))(at)


class Pairs(nn.Module):
    """The energy as a sum over points of a network of a sum over their neighbours: nothing knows of pairs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.point = mlp(2, 32, 16), mlp(16, 32, 1)

    def forward(self, at: Tensor) -> Tensor:
        """Return the energy [b] of configurations [b, 4, 3]."""
        r = distances(at)
        features = self.pair(torch.stack([r.reciprocal(), torch.exp(-r)], dim=-1))
        sums = features.new_zeros(*at.shape[:-1], features.shape[-1])
        for number, (i, j) in enumerate(zip(*PAIRS, strict=True)):
            of_pair = features[..., number, :]
            sums = sums + of_pair[..., None, :] * _marks(i, j).to(features)
        return self.point(sums).sum(dim=(-1, -2))


def _marks(i: Tensor, j: Tensor) -> Tensor:
    return (torch.eye(POINTS)[i] + torch.eye(POINTS)[j])[:, None]


def energies(u: Any, at: Tensor, given: Tensor) -> Tensor:
    """Return the residual of the energy."""
    return u(at) - given


def forces(u: Any, at: Tensor, given: Tensor) -> Tensor:
    """Return the residuals of the 12 components of the forces."""
    return (grad(u)(at) - given).flatten()


def configurations(number: int, seed: int) -> Tensor:
    """Return points that are neither too close nor apart: a tetrahedron near rest, shaken."""
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) * 1.12 / 8**0.5
    shake = torch.rand(number, POINTS, 3, generator=torch.Generator().manual_seed(seed)) - 0.5
    return corners + 0.2 * shake


def lennard_jones() -> Problem:
    """Return the problem; a step sees 60 of 600 configurations, 60 + 720 rows."""
    train, test = configurations(600, 1), configurations(1000, 2)
    of_train, on_train = energy(train), force(train)

    def draw() -> list[Term]:
        some = torch.randperm(len(train))[:60]
        return [
            Term(energies, train[some], of_train[some]),
            Term(forces, train[some], on_train[some]),
        ]

    def found(model: nn.Module) -> Tensor:
        return vmap(grad(lambda at: model(at[None])[0]))(test)

    def plot(model: nn.Module, axis: Any) -> None:
        axis.scatter(force(test).flatten(), found(model).detach().flatten(), s=2)
        axis.set(xlabel="force", ylabel="force of the network")

    return Problem(
        title="Energies and forces of Lennard-Jones points",
        model=Pairs,
        draw=draw,
        error=lambda model: relative_error(found(model), force(test)),
        plot=plot,
        ggn={"alpha": 1e-3, "damping_warmup_steps": 60, "damping_warmup_factor": 1e2},
    )
