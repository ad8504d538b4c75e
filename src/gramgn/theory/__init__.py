"""The quantities of the paper's two theorems (arXiv 1905.11675, section 3.2 and appendix), to be computed and met.

The network is ``gramgn.models.TwoLayer``. The docstrings of this package number its formulas as follows; everything
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
====  ==============================================================================================================

Symbols: n samples, d features, M width, b samples in a batch, r = f - y residuals [n], rho the spectral radius.
"""

from gramgn.theory._gauss_seidel import Splitting, split
from gramgn.theory._kernel import LimitKernel, limit_kernel
from gramgn.theory._network import gram, jacobian
from gramgn.theory._path import Path, PathPoint, Start, follow, ggn_step
from gramgn.theory._rates import contraction, fitted_exponent, last_order, orders, quadratic_constants
from gramgn.theory._spectrum import Prediction, linear_residuals, predict, spectral_radius

__all__ = [
    "LimitKernel",
    "Path",
    "PathPoint",
    "Prediction",
    "Splitting",
    "Start",
    "contraction",
    "fitted_exponent",
    "follow",
    "ggn_step",
    "gram",
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
