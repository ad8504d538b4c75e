"""The split G = D - L - L^T by batches, and the iteration matrix A = L^T (D - L)^-1 as something that is applied.

On the linearised network a step of batch B with lambda = 1, alpha = 0 changes the residuals of all samples by
r <- r - G[:, B] G[B, B]^-1 r[B]. One epoch of them is block Gauss-Seidel for G z = -r_0, with r = r_0 + G z, and its
residuals obey r <- A r: from G z = -r_0 with (D - L) z' = L^T z - r_0 follows r' = r_0 + G z' = L^T (z - z') and
(D - L) (z' - z) = -r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gramgn.theory.checks import check_float64, check_positive, checked_gram, is_singular, whole


@dataclass(frozen=True)
class Splitting:
    """G = D - L - L^T, formula (6), for batches of consecutive samples.

    Attributes:
        G: [n, n].
        batch_size: b; the last batch is smaller where n is no multiple of it.
        bounds: First sample and the one after the last of each batch, in their order.
    """

    G: Tensor
    batch_size: int
    bounds: tuple[tuple[int, int], ...]

    @cached_property
    def D(self) -> Tensor:  # noqa: N802 - the paper's symbol
        """The block diagonal [n, n] of G."""
        return self.G * self._batch_mask(lambda row, column: row == column)

    @cached_property
    def L(self) -> Tensor:  # noqa: N802
        """Minus the strict block lower part [n, n] of G."""
        return -self.G * self._batch_mask(lambda row, column: row > column)

    def apply(self, r: Tensor) -> Tensor:
        """Return A r, formula (7), for residuals r [n] or columns of them [n, p]; A is not formed.

        That is what one epoch, batch after batch, makes of the residuals of the linearised network. Those of the
        last batch are zero after it.

        Raises:
            ValueError: r is of another shape or dtype.
        """
        check_float64(r=r)
        if r.ndim not in (1, 2) or len(r) != len(self.G):
            n = len(self.G)
            raise ValueError(
                f"r must be residuals [{n}] or columns of them [{n}, p], got shape {list(r.shape)}"
            )
        columns = r[:, None] if r.ndim == 1 else r
        # D - L = C (I - C^-1 L C^-T) C^T with D = C C^T: triangular solves instead of a loop over the batches.
        s = torch.linalg.solve_triangular(self._C, columns, upper=False)
        s = torch.linalg.solve_triangular(self._unit_lower, s, upper=False, unitriangular=True)
        s = torch.linalg.solve_triangular(self._C.T, s, upper=True)
        result = self.L.T @ s
        return result[:, 0] if r.ndim == 1 else result

    def iteration_matrix(self) -> Tensor:
        """Return A [n, n] as a matrix; `apply` does without it."""
        return self.apply(torch.eye(len(self.G), dtype=self.G.dtype, device=self.G.device))

    @cached_property
    def _C(self) -> Tensor:  # noqa: N802 - as in the comment above
        return torch.linalg.cholesky(self.D)

    @cached_property
    def _unit_lower(self) -> Tensor:
        half = torch.linalg.solve_triangular(self._C, self.L, upper=False)
        scaled = torch.linalg.solve_triangular(self._C, half.T, upper=False).T
        return torch.eye(len(scaled), dtype=scaled.dtype, device=scaled.device) - scaled.tril(-1)

    def _batch_mask(self, holds: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sizes = torch.tensor([stop - start for start, stop in self.bounds], device=self.G.device)
        batch = torch.arange(len(sizes), device=self.G.device).repeat_interleave(sizes)
        return holds(batch[:, None], batch[None, :])


def split(G: Tensor, batch_size: int) -> Splitting:
    """Split a Gram matrix by batches of consecutive samples, formula (6).

    Args:
        G: G_0 [n, n] or K, symmetric, in float64.
        batch_size: b >= 1. Where it does not divide n the last batch is smaller, as in training; with b >= n there is
            one batch, L = 0 and A = 0.

    Raises:
        ValueError: G is no Gram matrix (not symmetric, a negative eigenvalue) or of another shape or dtype; the block
            of a batch is singular (repeated inputs in one batch, or a width with fewer than b columns in J), so that
            no step of it is defined for alpha = 0.
    """
    G = checked_gram(G.detach() if isinstance(G, Tensor) else G)
    batch_size = whole("batch_size", batch_size, 1)
    n = len(G)
    bounds = tuple((start, min(start + batch_size, n)) for start in range(0, n, batch_size))
    for number, (start, stop) in enumerate(bounds):
        _check_block(G[start:stop, start:stop], number, start, stop)
    return Splitting(G, batch_size, bounds)


def _check_block(block: Tensor, number: int, start: int, stop: int) -> None:
    spectrum = torch.linalg.eigvalsh(block)
    check_positive(spectrum, f"the block of batch {number} (samples {start} to {stop - 1}) of G")
    if is_singular(float(spectrum[0]), float(spectrum[-1]), len(block)):
        raise ValueError(
            f"the block of batch {number} (samples {start} to {stop - 1}) of G is singular: eigenvalues from "
            f"{float(spectrum[0]):.1e} to {float(spectrum[-1]):.1e}. Leave out repeated inputs, or take a width M "
            f"with at least {stop - start} weights M d"
        )
