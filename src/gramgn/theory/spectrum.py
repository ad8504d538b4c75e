"""Rates before training: the spectral radius of A, the condition number mu_P, and the bound they give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramgn.theory.checks import EPS, check_float64, whole
from gramgn.theory.gauss_seidel import Splitting

METHODS = ("auto", "dense", "sparse")
MOST_DENSE = 4000
"""Samples up to which `"auto"` computes all eigenvalues: the largest moduli lie so close together (0.9936, 0.9933,
0.9932 for n = 2,000) that a few thousand applications of A took 12 s where all eigenvalues took 2.3 s."""
NUM_LARGEST, NUM_VECTORS = 6, 120
TOLERANCE = 1e-10
MOST_RESTARTS = 1000


@dataclass(frozen=True)
class Prediction:
    """What is known of mini-batch training before it, formulas (7) to (9).

    Attributes:
        rho: Spectral radius of A: the predicted contraction of |f - y| per epoch, at most 1. 0 for one batch, whose
            error term is quadratic.
        mu_P: Condition number of the eigenvectors of A, at least 1; infinite where A cannot be diagonalised in
            float64.
        eigenvalues: Of A [n], complex, by falling modulus.
    """

    rho: float
    mu_P: float  # noqa: N815 - the paper's symbol
    eigenvalues: Tensor

    def bound(self, num_epochs: int) -> float:
        """Return mu_P rho^T of formula (9): what |f - y| is multiplied by in T epochs at most."""
        num_epochs = whole("num_epochs", num_epochs, 0)
        return math.inf if math.isinf(self.mu_P) else self.mu_P * self.rho**num_epochs


def predict(splitting: Splitting) -> Prediction:
    """Return rho, mu_P and all eigenvalues of A, from A as a matrix: time n^3, memory n^2.

    0 is an eigenvalue of A at least as often as the first batch has samples, so its eigenvectors are not unique:
    an orthonormal basis of them is taken, which keeps mu_P from depending on rounding.
    """
    A = splitting.iteration_matrix()
    values, vectors = torch.linalg.eig(A)
    order = values.abs().argsort(descending=True)
    null_space = _null_space(A)
    # eig returns columns of length 1, as formula (8) asks for.
    kept = vectors[:, order[: len(A) - null_space.shape[1]]]
    P_inverse = torch.cat([kept, null_space.to(kept.dtype)], dim=1)
    return Prediction(float(values.abs().max()), _condition_number(P_inverse), values[order])


def linear_residuals(splitting: Splitting, r: Tensor, num_epochs: int) -> list[float]:
    """Return |r|, |A r|, ..., |A^T r|: |f - y| of the linearised network before the first epoch and after each.

    This is what rho(A) describes for large T; for a finite T it is the sharper prediction.

    Args:
        splitting: G_0 split by batches.
        r: f_0 - y [n].
        num_epochs: T.

    Raises:
        ValueError: r is no vector [n] in float64, or T is negative.
    """
    check_float64(r=r)
    if r.shape != splitting.G.shape[:1]:
        raise ValueError(f"r must be residuals [{len(splitting.G)}], got shape {list(r.shape)}")
    num_epochs = whole("num_epochs", num_epochs, 0)
    norms = [float(r.norm())]
    for _ in range(num_epochs):
        r = splitting.apply(r)
        norms.append(float(r.norm()))
    return norms


def spectral_radius(splitting: Splitting, *, method: str = "auto") -> float:
    """Return rho(A), the largest modulus of an eigenvalue of A, formula (7).

    Below 1 where G is positive definite. 1 where it is singular (inputs repeated in different batches, M d < n):
    then the linearised network has residuals that never shrink. 0 for one batch.

    Args:
        splitting: G split by batches.
        method: `"dense"`: all eigenvalues of A as a matrix. `"sparse"`: implicitly restarted Arnoldi iteration
            (ARPACK), which only applies A; needs scipy. `"auto"`: dense up to 4,000 samples.

    Raises:
        ValueError: Another method.
        ImportError: scipy is not installed and is needed.
        RuntimeError: The sparse iteration failed or did not converge.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    n = len(splitting.G)
    if not bool(splitting.L.any()):
        return 0.0  # one batch, or batches that do not act on each other; ARPACK rejects A = 0
    # ARPACK finds fewer than n - 1 eigenvalues; where that is near there is nothing to gain.
    if method == "dense" or n <= (MOST_DENSE if method == "auto" else 4 * NUM_LARGEST):
        return float(torch.linalg.eigvals(splitting.iteration_matrix()).abs().max())
    return _arnoldi(splitting)


def _arnoldi(splitting: Splitting) -> float:
    try:
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigs
    except ImportError as error:
        raise ImportError(
            f"the spectral radius for {len(splitting.G)} samples needs scipy, which is not installed: python -m pip "
            "install \".[theory]\", or take method='dense' (time n^3)"
        ) from error
    G = splitting.G

    def apply(r: Any) -> Any:
        given = torch.as_tensor(r, dtype=G.dtype, device=G.device).reshape(len(G))
        return splitting.apply(given).cpu().numpy()

    operator = LinearOperator(tuple(G.shape), matvec=apply, dtype="float64")
    # A fixed start, so that the same input gives the same digits; ARPACK's own is drawn at random.
    start = torch.cos(torch.arange(len(G), dtype=G.dtype)).numpy()
    try:
        values = eigs(
            operator,
            k=NUM_LARGEST,
            ncv=min(NUM_VECTORS, len(G)),
            which="LM",
            tol=TOLERANCE,
            maxiter=MOST_RESTARTS,
            return_eigenvectors=False,
            v0=start,
        )
    except ArpackError as error:  # no convergence is one of them
        raise RuntimeError(
            f"the Arnoldi iteration for rho(A) failed ({error}); take method='dense'"
        ) from error
    return float(max(abs(value) for value in values))


def _null_space(A: Tensor) -> Tensor:
    """Return an orthonormal basis [n, k] of the vectors that A maps to zero."""
    _, singular, right = torch.linalg.svd(A)
    return right[singular <= len(A) * EPS * singular[0]].T


def _condition_number(matrix: Tensor) -> float:
    singular = torch.linalg.svdvals(matrix)
    least, largest = float(singular[-1]), float(singular[0])
    return largest / least if least > len(matrix) * EPS * largest else math.inf
