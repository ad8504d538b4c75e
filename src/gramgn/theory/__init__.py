"""The quantities of the paper's two theorems (arXiv 1905.11675, section 3.2 and appendix), to be computed and met.

The network is `gramgn.models.TwoLayer`. The docstrings of this package number its formulas as follows; everything
is in float64, and all quantities are plain numbers without a unit (residuals in the targets' unit).

====  ==============================================================================================================
(1)   f(W, x) = (1 / sqrt M) a^T sigma(W x): the network; W [M, d] is trained, rows drawn from N(0, I)
(2)   J_i = (1 / sqrt M) (sigma'(W x_i) o a) x_i^T: row i of the Jacobian J [n, M d]
(3)   G = J J^T [n, n]: the Gram matrix; G_ij = <x_i, x_j> (1 / M) sum_m sigma'(w_m . x_i) sigma'(w_m . x_j)
(4)   K_ij = E_w [<x_i, x_j> sigma'(w . x_i) sigma'(w . x_j)]: its limit for M to infinity; lambda_0 = lambda_min(K)
(5)   |f_(t+1) - y| <= (C / sqrt M) |f_t - y|^2: Theorem 1, full batch, lambda = 1, alpha = 0
(6)   G_0 = D - L - L^T: D the diagonal blocks of the batches, -L the strict block lower part
(7)   A = L^T (D - L)^-1: one epoch of cyclic mini-batches on the linearised network, r -> A r (block Gauss-Seidel)
(8)   A = P^-1 Q P with Q diagonal; mu_P = |P| |P^-1| in spectral norms, the columns of P^-1 of length 1
(9)   |f_T - y| <= mu_P rho(A)^T |f_0 - y| on the linearised network after T epochs; Theorem 2 bounds it for the
      network itself by mu_P sqrt(n) (1 - Omega(lambda_0^2 / n^2))^T
(10)  r <- (I - G (lambda G + alpha I)^-1) r: a relaxed full-batch step on the linearised network
(11)  r <- (I - eta G) r: a step of gradient descent on 1/2 |f - y|^2 with learning rate eta on it
====  ==============================================================================================================

Symbols: n samples, d features, M width, b samples in a batch, r = f - y residuals [n], rho the spectral radius.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gramgn.theory.full_batch import FullBatch, best_learning_rate, gauss_newton, gradient_descent
    from gramgn.theory.gauss_seidel import Splitting, split
    from gramgn.theory.kernel import CLOSED_FORMS, LimitKernel, hermite_series, limit_kernel
    from gramgn.theory.network import gram, jacobian
    from gramgn.theory.observer import Observer
    from gramgn.theory.path import Path, PathPoint, Start, descent_step, follow, ggn_step
    from gramgn.theory.rates import contraction, fitted_exponent, last_order, orders, quadratic_constants
    from gramgn.theory.spectrum import Prediction, linear_residuals, predict, spectral_radius

_HOME_OF = {
    "full_batch": ("FullBatch", "best_learning_rate", "gauss_newton", "gradient_descent"),
    "gauss_seidel": ("Splitting", "split"),
    "kernel": ("CLOSED_FORMS", "LimitKernel", "hermite_series", "limit_kernel"),
    "network": ("gram", "jacobian"),
    "observer": ("Observer",),
    "path": ("Path", "PathPoint", "Start", "descent_step", "follow", "ggn_step"),
    "spectrum": ("Prediction", "linear_residuals", "predict", "spectral_radius"),
    "rates": ("contraction", "fitted_exponent", "last_order", "orders", "quadratic_constants"),
}

__all__ = [
    "CLOSED_FORMS",
    "FullBatch",
    "LimitKernel",
    "Observer",
    "Path",
    "PathPoint",
    "Prediction",
    "Splitting",
    "Start",
    "best_learning_rate",
    "contraction",
    "descent_step",
    "fitted_exponent",
    "follow",
    "gauss_newton",
    "ggn_step",
    "gradient_descent",
    "gram",
    "hermite_series",
    "jacobian",
    "last_order",
    "limit_kernel",
    "linear_residuals",
    "orders",
    "predict",
    "quadratic_constants",
    "spectral_radius",
    "split",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for: `gramgn.theory.rates` needs no torch."""
    for module, names in _HOME_OF.items():
        if name in names:
            return getattr(importlib.import_module(f"gramgn.theory.{module}"), name)
    raise AttributeError(f"module 'gramgn.theory' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
