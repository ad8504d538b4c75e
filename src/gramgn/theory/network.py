"""J and G of the two-layer network in closed form; see the package for the numbers of the formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramgn.models import TwoLayer
from gramgn.theory.checks import check_float64, check_samples


def slopes(model: TwoLayer, x: Tensor) -> Tensor:
    """Return (1 / sqrt M) sigma'(W x_i) o a for every sample, [n, M]: what formula (2) multiplies by x_i^T.

    Args:
        model: The network, in float64.
        x: Samples [n, d].

    Raises:
        TypeError: Another network.
        ValueError: Another shape or dtype.
    """
    if not isinstance(model, TwoLayer):
        raise TypeError(f"the theory is about gramgn.models.TwoLayer, got {type(model).__name__}")
    check_samples(x)
    W = model.hidden.weight.detach()
    check_float64(**{"the network's weight": W})
    if x.shape[1] != W.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features, the network takes {W.shape[1]}")
    return model.sigma.derivative(x @ W.T) * model.signs / math.sqrt(model.width)


def jacobian(model: TwoLayer, x: Tensor) -> Tensor:
    """Return J by formula (2); columns in the order of `model.hidden.weight.flatten()`.

    Args:
        model: The network at any W, in float64.
        x: Samples [n, d].

    Returns:
        J [n, M d]. Where only G is wanted, `gram` does without it.

    Raises:
        ValueError: Another shape or dtype.
    """
    return (slopes(model, x)[:, :, None] * x[:, None, :]).flatten(start_dim=1)


def gram(model: TwoLayer, x: Tensor) -> Tensor:
    """Return G = J J^T by formula (3); at the initial W it is G_0. J is not formed.

    rank(G) <= M d, so with a width below n / d it is singular.

    Args:
        model: The network at any W, in float64.
        x: Samples [n, d].

    Returns:
        G [n, n], symmetric.

    Raises:
        ValueError: Another shape or dtype.
    """
    s = slopes(model, x)
    return gram_of(s, x)


def gram_of(s: Tensor, x: Tensor) -> Tensor:
    """Return G [n, n] from slopes s [n, M] and samples x [n, d]."""
    G: Tensor = (s @ s.T) * (x @ x.T)
    return (G + G.T) / 2


def outputs(model: TwoLayer, x: Tensor) -> Tensor:
    """Return f(W, x) [n] by formula (1), without gradients."""
    with torch.no_grad():
        f: Tensor = model(x)
    return f
