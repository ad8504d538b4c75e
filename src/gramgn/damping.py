"""The conventions in which alpha can be given, and the conversion between them; pure Python.

The damping in the system (lam G + alpha_sum I) u = r with the sum G = J J^T is always `alpha_sum`. A user
configures alpha in one of three conventions:

- `"sum"`: as Algorithm 1 of arXiv 1905.11675 prints the formula, alpha_sum = alpha.
- `"mean"`: relative to the mean J J^T / b over b samples, which goes with the mean square loss:
  alpha_sum = alpha b.
- `"trace"`: relative to the mean eigenvalue of G, trace(G) / n with n rows, so that rescaling the outputs changes
  nothing: alpha_sum = alpha trace(G) / n. Known only once G is.
"""

from __future__ import annotations

CONVENTIONS = ("sum", "mean", "trace")


def sum_scale(convention: str, *, num_samples: int, mean_eigenvalue: float | None = None) -> float:
    """Return the factor between the two conventions: alpha_sum = factor * alpha.

    Args:
        convention: `"sum"`, `"mean"` or `"trace"`.
        num_samples: The number of samples b in the batch (not rows: also for several outputs per sample).
        mean_eigenvalue: trace(G) / n; needed for `"trace"` only.

    Raises:
        ValueError: The convention is unknown, or it is `"trace"` and no mean eigenvalue is given.
    """
    if convention == "sum":
        return 1.0
    if convention == "mean":
        return float(num_samples)
    if convention != "trace":
        raise ValueError(
            f"damping_convention must be one of {', '.join(map(repr, CONVENTIONS))}, got {convention!r}"
        )
    if mean_eigenvalue is None:
        raise ValueError("damping_convention 'trace' can be converted only where trace(G) is known")
    return mean_eigenvalue


def alpha_to_sum(
    alpha: float, convention: str, *, num_samples: int, mean_eigenvalue: float | None = None
) -> float:
    """Return an alpha given in `convention` in the sum convention; see `sum_scale`."""
    return alpha * sum_scale(convention, num_samples=num_samples, mean_eigenvalue=mean_eigenvalue)


def alpha_from_sum(
    alpha_sum: float, convention: str, *, num_samples: int, mean_eigenvalue: float | None = None
) -> float:
    """Return an alpha given in the sum convention in `convention`; see `sum_scale`."""
    return alpha_sum / sum_scale(convention, num_samples=num_samples, mean_eigenvalue=mean_eigenvalue)
