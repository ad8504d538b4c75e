"""The solve: u = (lam G + damping I)^-1 r, in float64. It never changes the damping, nor cuts where there is some."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHOLESKY = "cholesky"
EIGH = "eigh"
MINIMUM_NORM = "minimum_norm"
NON_FINITE = "non_finite"
STATUSES = (CHOLESKY, EIGH, MINIMUM_NORM, NON_FINITE)
EPS64 = torch.finfo(torch.float64).eps


class SolveError(RuntimeError):
    """The linear system could not be solved; the parameters are as they were before the step."""


@dataclass(frozen=True)
class Solution:
    """The solution of the linear system.

    Attributes:
        u: The solution [n] in float64.
        status: How it was found, one of `STATUSES`.
        ill_conditioned: Whether the small eigenvalues of G were rounding.
    """

    u: Tensor
    status: str
    ill_conditioned: bool


def solve_system(G: Tensor, r: Tensor, lam: float, damping: float, eps: float) -> Solution:
    """Solve (lam G + damping I) u = r.

    With damping: Cholesky, and where that fails eigenvalues clamped at 0, with all directions kept. A jitter would
    change the damping without the user's knowledge, and cutting directions would throw away most of the step. Without
    damping (0, or lost in float64 rounding): the minimum-norm solution, for which eigenvalues up to n `eps` times the
    largest are cut, as `lstsq` and `pinv` do. A Cholesky factorisation that succeeds proves nothing there.

    Args:
        G: Gram matrix [n, n] in float64, symmetric and positive semi-definite; its lower triangle is factorised.
        r: Right-hand side [n] in float64.
        lam: Weight of G, > 0.
        damping: What is added to the diagonal, >= 0: the paper's alpha in the sum convention, plus weight decay.
        eps: Relative precision in which J, and so G, was formed.

    Returns:
        The solution; its status is `"non_finite"` where G, r, the damping or u has an entry that is not finite.

    Raises:
        torch.linalg.LinAlgError: The eigenvalue decomposition did not converge.
    """
    # Numbers are copied from a device together: each transfer waits for all work that was launched.
    norm, of_r, trace = torch.stack(
        [torch.linalg.vector_norm(G), torch.linalg.vector_norm(r), torch.trace(G)]
    ).tolist()
    # A norm may overflow although all entries are finite.
    is_finite = math.isfinite(norm + of_r) or bool(torch.isfinite(G).all() & torch.isfinite(r).all())
    if not (is_finite and math.isfinite(damping)):
        return Solution(torch.full_like(r, torch.nan), NON_FINITE, ill_conditioned=False)
    if damping <= 0 or not _exceeds(damping / lam, len(G) * EPS64, G, norm, trace):
        u, cut = _minimum_norm(G, r, lam, damping, eps)
        status = MINIMUM_NORM if bool(torch.isfinite(u).all()) else NON_FINITE
        return Solution(u, status, cut)
    u, status = _damped(G, r, lam, damping)
    return Solution(u, status, not _exceeds(damping / lam, eps, G, norm, trace))


def _damped(G: Tensor, r: Tensor, lam: float, damping: float) -> tuple[Tensor, str]:
    """Return u and its status: by Cholesky, else by eigenvalues g with weights 1 / (lam max(g, 0) + damping)."""
    # lam G + damping I = L L^T
    system = lam * G
    system.diagonal().add_(damping)
    L, info = torch.linalg.cholesky_ex(system)
    u = torch.cholesky_solve(r[:, None], L)[:, 0]
    failed, largest = torch.stack([info.to(u.device, u.dtype), u.abs().max()]).tolist()
    if failed:
        # G = V diag(g) V^T
        g, V = torch.linalg.eigh(G)
        u = V @ ((V.T @ r) / (lam * g.clamp(min=0) + damping))
        largest = float(u.abs().max())
    return u, NON_FINITE if not math.isfinite(largest) else EIGH if failed else CHOLESKY


def _minimum_norm(G: Tensor, r: Tensor, lam: float, damping: float, eps: float) -> tuple[Tensor, bool]:
    """Return u without the directions that are rounding, and whether there were any."""
    g, V = torch.linalg.eigh(G)
    kept = g > len(G) * eps * g[-1]
    weights = torch.where(kept, 1 / (lam * torch.where(kept, g, 1.0) + damping), 0.0)
    return V @ (weights * (V.T @ r)), not bool(kept.all())


def _exceeds(damping: float, factor: float, G: Tensor, norm: float, trace: float) -> bool:
    """Return whether `damping` > `factor` * lambda_max(G), given |G|_F and trace(G).

    Eigenvalues are computed only where |G|_F^2 / trace(G) <= lambda_max <= |G|_F does not decide.
    """
    if damping > factor * norm:
        return True
    if trace > 0 and damping < factor * norm**2 / trace:
        return False
    return damping > factor * float(torch.linalg.eigvalsh(G)[-1])
