"""Data and networks that the tests of the theory share; all in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from gramgn.data import Sphere
from gramgn.models import TwoLayer

SMOOTH = ("erf", "tanh", "softplus", "gelu")


def sphere(n: int = 100, d: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the n training points of dataset=sphere, [n, d], and their targets [n]."""
    data = Sphere(dim=d, num_points=n, seed=seed).load(0)
    train = data.split == "train"
    return torch.from_numpy(data.images[train]), torch.from_numpy(data.targets[train])


def two_layer(M: int, d: int = 20, activation: str = "erf", seed: int = 0) -> TwoLayer:
    """Return a network at its initialisation."""
    torch.manual_seed(seed)
    return TwoLayer(d, width=M, activation=activation).double()
