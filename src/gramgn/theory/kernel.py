"""The limit kernel K: closed forms, and a Hermite series with an error estimate where there is none.

For w from N(0, I) the pair (u, v) = (w . x, w . x') is normal with variances p = |x|^2, q = |x'|^2 and covariance
c = <x, x'>, so K(x, x') = c E[sigma'(u) sigma'(v)] is a function of p, q and c.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.models import activation_named
from gramgn.theory.checks import EPS, check_samples, is_singular, repeated_rows, whole

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
SHORTEST = 1e-70
"""Of a sample: products of four coordinates stay above 0."""
HALF_RANGE = 14.0
"""Of the integrals, in standard deviations; exp(-14^2 / 4) is far below float64 rounding."""


@dataclass(frozen=True)
class LimitKernel:
    """K and how well it is known.

    Attributes:
        K: [n, n], formula (4).
        error: Estimated largest error of an entry of K.
        method: `"closed form"` or `"Hermite series"`.
    """

    K: Tensor
    error: float
    method: str

    @property
    def lambda_0(self) -> float:
        """The least eigenvalue of K; zero or of the size of `lambda_0_error` where inputs are repeated."""
        return float(torch.linalg.eigvalsh(self.K)[0])

    @property
    def lambda_0_error(self) -> float:
        """The error of `lambda_0` that follows: n times that of an entry (Weyl's inequality), and rounding."""
        n = len(self.K)
        return n * (self.error + EPS * float(self.K.diagonal().max()))


def limit_kernel(x: Tensor, activation: str, *, num_terms: int = 192, num_nodes: int = 1025) -> LimitKernel:
    """Return the limit kernel K of formula (4) on samples x.

    `erf` (the derivative of the arcsine kernel, Williams 1997), `gelu` and `relu` (arc-cosine kernel of order 0,
    Cho and Saul 2009) have closed forms. `tanh` and `softplus` are expanded in normalised Hermite polynomials
    h_k: with c_k(p) = E[sigma'(sqrt(p) z) h_k(z)] Mehler's formula gives

        E[sigma'(u) sigma'(v)] = sum_k c_k(p) c_k(q) (c / sqrt(p q))^k.

    What is left out of the series is bounded by Parseval's identity (the diagonal needs no series); the integrals are
    trapezoid sums, which converge exponentially, and their error is that of leaving out every second node. The closed
    forms are as exact as <x, x'> is: for long inputs, and for relu where two inputs are nearly parallel, that is less
    exact than rounding, and the error says how much.

    Args:
        x: Samples [n, d] in float64.
        activation: The name of sigma.
        num_terms: Terms of the series. The default is good to rounding for |x| <= 1; longer inputs take more.
        num_nodes: Nodes of the integrals, odd.

    Returns:
        K, the estimated error of its entries, and how it was found. Samples that are repeated make K singular:
        that is warned about, with the rows.

    Raises:
        TypeError: x is no tensor.
        ValueError: Another activation, shape or dtype, an input of zeros only, or too few terms or nodes.
    """
    check_samples(x)
    x = x.detach()
    activation = activation_named(activation).name
    num_terms, num_nodes = whole("num_terms", num_terms, 1), whole("num_nodes", num_nodes, 3)
    if num_nodes % 2 == 0:
        raise ValueError(f"num_nodes must be odd, got {num_nodes}")
    c = x @ x.T
    c = (c + c.T) / 2
    p = c.diagonal().clone()
    short = p < SHORTEST**2
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise ValueError(
            f"row {row} of x is zero{'' if p[row] == 0 else ' up to rounding'}: its row of K is too, and lambda_0 = 0; "
            "leave it out"
        )
    if activation in CLOSED_FORMS:
        mean, error = _closed_form(CLOSED_FORMS[activation], p, c, x.shape[1])
        method = "closed form"
    else:
        mean, error = hermite_series(activation_named(activation).derivative, p, c, num_terms, num_nodes)
        method = "Hermite series"
    K = c * mean
    # A few roundings in every entry, whatever the method.
    kernel = LimitKernel(K, float(p.max()) * error + 16 * EPS * float(K.abs().max()), method)
    _warn_if_singular(kernel, x)
    return kernel


def _closed_form(form: Form, p: Tensor, c: Tensor, num_features: int) -> tuple[Tensor, float]:
    """Return a closed form [n, n] and the estimated error of its entries that comes of the rounding of c."""
    mean = form(p[:, None], p[None, :], c)
    longest = (p[:, None] * p[None, :]).sqrt()
    # A sum of d products of rounded factors is off by at most (d + 2) EPS |x| |x'|.
    moved = c - c.sign() * (num_features + 2) * EPS * longest
    change = (form(p[:, None], p[None, :], moved) - mean).abs() * c.abs() / longest
    change.diagonal().zero_()  # there c = p, and the forms cancel nothing
    return mean, float(change.max())


def _gap(p: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """Return p q - c^2 = |x|^2 |x'|^2 sin^2, which rounding must not turn negative."""
    return (p * q - c.square()).clamp(min=0)


def _erf(p: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """E[exp(-u^2 - v^2)] is det(I + 2 Sigma)^(-1/2)."""
    return 4 / math.pi * (1 + 2 * (p + q) + 4 * _gap(p, q, c)).rsqrt()


def _gelu(p: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """E[(Phi(u) + u phi(u)) (Phi(v) + v phi(v))], term by term.

    Phi Phi is an orthant probability of two normals of variances 1 + p and 1 + q; the other terms follow from
    E[phi phi] = det(I + Sigma)^(-1/2) / (2 pi) by Stein's identity.
    """
    det = 1 + (p + q) + _gap(p, q, c)
    phi_phi = det.rsqrt() / (2 * math.pi)
    orthant = 0.25 + torch.asin(c / ((1 + p) * (1 + q)).sqrt()) / (2 * math.pi)
    return orthant + phi_phi * c * (1 / (1 + p) + 1 / (1 + q) + 1 / det)


def _relu(p: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """The probability that both are positive: (pi - angle) / (2 pi)."""
    return (math.pi - torch.acos((c / (p * q).sqrt()).clamp(-1, 1))) / (2 * math.pi)


CLOSED_FORMS: dict[str, Form] = {
    "erf": _erf,
    "gelu": _gelu,
    "relu": _relu,
}


def hermite_series(
    derivative: Callable[[Tensor], Tensor], p: Tensor, c: Tensor, num_terms: int, num_nodes: int
) -> tuple[Tensor, float]:
    """Return the matrix `E[sigma'(u) sigma'(v)]` and the estimated error of its entries, both of shape (n, n)."""
    coefficients, squares = _coefficients(derivative, p, num_terms, num_nodes)
    coarse, coarse_squares = _coefficients(derivative, p, num_terms, (num_nodes + 1) // 2)
    cosine = (c / (p[:, None] * p[None, :]).sqrt()).clamp(-1, 1)
    mean, power = torch.zeros_like(c), torch.ones_like(c)
    for column in coefficients.T:
        mean += torch.outer(column, column) * power
        power *= cosine
    mean.diagonal().copy_(squares)
    left_out = (squares - coefficients.square().sum(dim=1)).clamp(min=0).max()
    # |E[u v] - E[u' v']| <= |u - u'| |v| + |u'| |v - v'|, all of them norms of coefficients.
    of_integrals = 2 * squares.max().sqrt() * (coefficients - coarse).norm(dim=1).max()
    of_diagonal = (squares - coarse_squares).abs().max()
    return mean, float(left_out + of_integrals + of_diagonal)


def _coefficients(
    derivative: Callable[[Tensor], Tensor], p: Tensor, num_terms: int, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """Return c_k(p_i) [n, num_terms] and E[sigma'(sqrt(p_i) z)^2] [n] by the trapezoid rule.

    The rule converges exponentially for analytic functions on the whole line.
    """
    z = torch.linspace(-HALF_RANGE, HALF_RANGE, num_nodes, dtype=p.dtype, device=p.device)
    # The square root of the density stays with each factor: h_k alone overflows, h_k sqrt(density) is bounded.
    half = torch.exp(-z.square() / 4) / (2 * math.pi) ** 0.25 * (z[1] - z[0]).sqrt()
    values = derivative(p.sqrt()[:, None] * z) * half
    previous, h = torch.zeros_like(half), half
    columns = []
    for k in range(num_terms):
        columns.append(values @ h)
        previous, h = h, (z * h - math.sqrt(k) * previous) / math.sqrt(k + 1)
    return torch.stack(columns, dim=1), values.square().sum(dim=1)


def _warn_if_singular(kernel: LimitKernel, x: Tensor) -> None:
    spectrum = torch.linalg.eigvalsh(kernel.K)
    least, known = float(spectrum[0]), kernel.method == "closed form"
    if not is_singular(least, float(spectrum[-1]), len(x)) and not (known and least <= kernel.lambda_0_error):
        return
    pairs = repeated_rows(x)
    why = (
        f"rows {pairs[0][0]} and {pairs[0][1]} of x are equal or opposite"
        if pairs
        else "no rows are equal, but some nearly are, or too many lie in too few dimensions"
    )
    warnings.warn(
        f"lambda_0 is zero up to rounding ({least:.1e}; {why}): the theorems assume lambda_0 > 0; leave "
        "repeated inputs out",
        stacklevel=3,
    )
