"""The solve, u = (lam G + alpha I)^-1 r, in float64. It never changes alpha, nor cuts at alpha > 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.optim._info import CHOLESKY, EIGH, MINIMUM_NORM, NON_FINITE

EPS64 = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Solution:
    """u [n] in float64, how it was found, and whether G's small eigenvalues were rounding."""

    u: Tensor
    status: str
    ill_conditioned: bool


def solve(G: Tensor, r: Tensor, lam: float, alpha: float, eps: float) -> Solution:
    """Solve (lam G + alpha I) u = r.

    With damping: Cholesky, and where that fails eigenvalues clamped at 0, all directions kept. A jitter would
    change alpha behind the user's back, and cutting directions would throw away most of the step. Without
    damping (alpha = 0 or lost in float64 rounding): minimum norm, eigenvalues up to n ``eps`` times the largest
    cut off, as lstsq and pinv do. A Cholesky that succeeds proves nothing there.

    Args:
        G: Gram matrix [n, n] in float64, symmetric up to rounding, positive semi-definite.
        r: Residual [n] in float64.
        lam: Weight of G, > 0.
        alpha: Damping in the sum convention, >= 0.
        eps: Relative precision in which J, and so G, was formed.

    Returns:
        The solution; its status is ``"non_finite"`` where G, r, alpha or u has an entry that is no finite
        number.

    Raises:
        torch.linalg.LinAlgError: The eigenvalue decomposition did not converge.
    """
    # Numbers come over from a device together: each transfer waits for all that was launched.
    finite = torch.isfinite(G).all() & torch.isfinite(r).all()
    is_finite, norm, trace = torch.stack(
        [finite.to(G.dtype), torch.linalg.matrix_norm(G), torch.trace(G)]
    ).tolist()
    if not (is_finite and math.isfinite(alpha)):
        return Solution(torch.full_like(r, torch.nan), NON_FINITE, ill_conditioned=False)
    G = (G + G.T) / 2
    if alpha <= 0 or not exceeds(alpha / lam, len(G) * EPS64, G, norm, trace):
        u, cut = minimum_norm(G, r, lam, alpha, eps)
        status = MINIMUM_NORM if bool(torch.isfinite(u).all()) else NON_FINITE
        return Solution(u, status, cut)
    u, status = damped(G, r, lam, alpha)
    return Solution(u, status, not exceeds(alpha / lam, eps, G, norm, trace))


def damped(G: Tensor, r: Tensor, lam: float, alpha: float) -> tuple[Tensor, str]:
    """Return u and its status: Cholesky, else eigenvalues g with weights 1 / (lam max(g, 0) + alpha)."""
    system = lam * G
    system.diagonal().add_(alpha)
    L, info = torch.linalg.cholesky_ex(system)
    u = torch.cholesky_solve(r[:, None], L)[:, 0]
    failed, is_finite = torch.stack([info.to(u.device), torch.isfinite(u).all().to(info.dtype)]).tolist()
    if failed:
        g, V = torch.linalg.eigh(G)
        u = V @ ((V.T @ r) / (lam * g.clamp(min=0) + alpha))
        is_finite = bool(torch.isfinite(u).all())
    return u, NON_FINITE if not is_finite else EIGH if failed else CHOLESKY


def minimum_norm(G: Tensor, r: Tensor, lam: float, alpha: float, eps: float) -> tuple[Tensor, bool]:
    """Return u without the directions that are rounding, and whether there were any."""
    g, V = torch.linalg.eigh(G)
    kept = g > len(G) * eps * g[-1]
    weights = torch.where(kept, 1 / (lam * torch.where(kept, g, 1.0) + alpha), 0.0)
    return V @ (weights * (V.T @ r)), not bool(kept.all())


def exceeds(damping: float, factor: float, G: Tensor, norm: float, trace: float) -> bool:
    """Return whether ``damping`` > ``factor`` * lambda_max(G).

    Eigenvalues are computed only where |G|_F^2 / trace(G) <= lambda_max <= |G|_F does not tell.

    Args:
        damping: The number to compare.
        factor: What lambda_max is multiplied by.
        G: Symmetric positive semi-definite matrix.
        norm: |G|_F.
        trace: trace(G).
    """
    if damping > factor * norm:
        return True
    if trace > 0 and damping < factor * norm**2 / trace:
        return False
    return damping > factor * float(torch.linalg.eigvalsh(G)[-1])
