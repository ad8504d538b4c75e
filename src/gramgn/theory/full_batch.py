"""Full-batch methods on the linearised network: relaxed Gauss-Newton steps and gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.theory.checks import check_float64, check_positive, checked_gram, is_singular, whole


@dataclass(frozen=True)
class FullBatch:
    """A method that multiplies the residuals' component in each eigenvector of G by its own factor.

    Attributes:
        factors: [n], in the order of rising eigenvalues of G.
        vectors: Eigenvectors of G [n, n] in columns, in the same order.
    """

    factors: Tensor
    vectors: Tensor

    @property
    def rho(self) -> float:
        """The predicted contraction of |f - y| per step: the largest modulus of a factor; above 1 it diverges."""
        return float(self.factors.abs().max())

    def residuals(self, r: Tensor, num_steps: int) -> list[float]:
        """Return |f - y| of the linearised network before the first step and after each.

        Args:
            r: f_0 - y [n].
            num_steps: T.

        Raises:
            ValueError: r is no vector [n] in float64, or T is negative.
        """
        check_float64(r=r)
        if r.shape != self.factors.shape:
            raise ValueError(f"r must be residuals [{len(self.factors)}], got shape {list(r.shape)}")
        num_steps = whole("num_steps", num_steps, 0)
        component = self.vectors.T @ r
        norms = [float(component.norm())]
        for _ in range(num_steps):
            component = component * self.factors
            norms.append(float(component.norm()))
        return norms


def gauss_newton(G: Tensor, *, lam: float = 1.0, alpha: float = 0.0) -> FullBatch:
    """Return the relaxed Gauss-Newton step, formula (10): factors 1 - g / (lambda g + alpha).

    lambda = 1, alpha = 0 gives zero: there the error is quadratic (Theorem 1), not linear. A residual in the null
    space of G stays as it is.

    Args:
        G: G_0 [n, n], symmetric, in float64.
        lam: lambda > 0.
        alpha: alpha >= 0, in the sum convention.

    Raises:
        ValueError: Another shape or dtype, G is no Gram matrix, or a parameter is out of range.
    """
    if not 0 < lam < math.inf or not 0 <= alpha < math.inf:
        raise ValueError(f"lam must be above 0 and alpha at least 0, both finite, got {lam!r} and {alpha!r}")
    values, vectors = _spectrum(G)
    moved = torch.where(values > 0, values / (lam * values + alpha), 0.0)
    return FullBatch(1 - moved, vectors)


def gradient_descent(G: Tensor, *, lr: float) -> FullBatch:
    """Return gradient descent on 1/2 |f - y|^2, formula (11): factors 1 - eta g.

    Args:
        G: G_0 [n, n], symmetric, in float64.
        lr: eta > 0.

    Raises:
        ValueError: Another shape or dtype, G is no Gram matrix, or a learning rate that is not above 0.
    """
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be above 0 and finite, got {lr!r}")
    values, vectors = _spectrum(G)
    return FullBatch(1 - lr * values, vectors)


def best_learning_rate(G: Tensor) -> float:
    """Return 2 / (lambda_max + lambda_min) of G: gradient descent with the least rho, (kappa - 1) / (kappa + 1).

    Args:
        G: G_0 [n, n], symmetric, in float64.

    Raises:
        ValueError: Another shape or dtype, G is no Gram matrix, or it is zero.
    """
    values, _ = _spectrum(G)
    if not float(values[-1]) > 0:
        raise ValueError("G is zero: gradient descent does not move")
    return 2 / float(values[0] + values[-1])


def _spectrum(G: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, rising, those that are rounding as 0, and eigenvectors."""
    G = checked_gram(G.detach() if isinstance(G, Tensor) else G)
    values, vectors = torch.linalg.eigh(G)
    check_positive(values, "G")
    largest = float(values[-1])
    zero = torch.tensor([is_singular(float(value), largest, len(G)) for value in values], device=G.device)
    return values.masked_fill(zero, 0.0), vectors
