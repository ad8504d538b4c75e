"""The limit kernel against sampling, against itself by another way, and against wide networks."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from theory_cases import SMOOTH, sphere, two_layer

from gramgn.models import activation_named
from gramgn.theory import CLOSED_FORMS, fitted_exponent, gram, hermite_series, limit_kernel

NUM_DRAWS = 200_000


@pytest.mark.parametrize("activation", [*SMOOTH, "relu"])
def test_kernel_is_the_mean_over_weights(activation: str) -> None:
    """Formula (4) by brute force: within five standard errors, for inputs of lengths 0.3 to 2."""
    x = sphere(6, 5)[0] * torch.linspace(0.3, 2.0, 6, dtype=torch.float64)[:, None]
    w = torch.randn(NUM_DRAWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slope = activation_named(activation).derivative(x @ w.T)
    products = slope[:, None] * slope[None] * (x @ x.T)[:, :, None]
    error = products.std(dim=2) / math.sqrt(NUM_DRAWS)
    kernel = limit_kernel(x, activation)
    assert kernel.error < 1e-6  # so that what is compared is the mean, not the error of the series
    assert float(((products.mean(dim=2) - kernel.K).abs() / (error + kernel.error)).max()) < 5


@pytest.mark.parametrize("activation", ["erf", "gelu"])
def test_series_and_closed_form_agree(activation: str) -> None:
    x = sphere(40, 20)[0] * 0.9
    c = x @ x.T
    p = c.diagonal().clone()
    mean, error = hermite_series(activation_named(activation).derivative, p, c, 192, 1025)
    assert error < 1e-14
    torch.testing.assert_close(
        mean, CLOSED_FORMS[activation](p[:, None], p[None, :], c), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("length", [1.0, 6.0])
@pytest.mark.parametrize("num_terms", [4, 64])
@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_error_estimate_holds(activation: str, num_terms: int, length: float) -> None:
    """A short series is wrong by no more than it says, and says little more than it must."""
    x = length * torch.cat([sphere(8, 3)[0], sphere(8, 3)[0] + 1e-3])
    exact = limit_kernel(x, activation, num_terms=3000, num_nodes=4097)
    short = limit_kernel(x, activation, num_terms=num_terms)
    difference = float((short.K - exact.K).abs().max())
    assert difference <= short.error + exact.error
    assert short.error <= 10 * difference + 1e-12


@pytest.mark.parametrize("length", [1.0, 30.0])
@pytest.mark.parametrize("activation", ["erf", "gelu", "relu"])
@pytest.mark.filterwarnings("ignore:lambda_0 is zero")
def test_error_of_the_closed_forms_holds(activation: str, length: float) -> None:
    """Long and nearly parallel inputs: c = <x, x'> is rounded, and the forms depend on p q - c^2 or on the angle.

    The reference is the same form of exact products, in 60 digits.
    """
    mpmath = pytest.importorskip("mpmath", reason="comes with torch")
    x = length * torch.cat([sphere(6, 5)[0], sphere(2, 5)[0] + 1e-9, 3 * sphere(2, 5)[0]])
    kernel = limit_kernel(x, activation)
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(value) for value in row] for row in x.tolist()]

        def product(i: int, j: int) -> Any:
            return mpmath.fdot(rows[i], rows[j])

        def entry(i: int, j: int) -> Any:
            p, q, c = product(i, i), product(j, j), product(i, j)
            gap = p * q - c * c
            if activation == "relu":
                return c * (mpmath.pi - mpmath.atan2(mpmath.sqrt(gap), c)) / (2 * mpmath.pi)
            if activation == "erf":
                return c * 4 / mpmath.pi / mpmath.sqrt(1 + 2 * p + 2 * q + 4 * gap)
            det = 1 + p + q + gap
            orthant = 0.25 + mpmath.asin(c / mpmath.sqrt((1 + p) * (1 + q))) / (2 * mpmath.pi)
            inner = c * (1 / (1 + p) + 1 / (1 + q) + 1 / det) / (2 * mpmath.pi * mpmath.sqrt(det))
            return c * (orthant + inner)

        pairs = [(i, j) for i in range(len(x)) for j in range(len(x)) if i != j]
        wrong = max(abs(entry(i, j) - float(kernel.K[i, j])) for i, j in pairs)
    assert float(wrong) <= kernel.error
    if activation != "relu":
        assert kernel.error < 1e-12 * length**3


def test_erf_kernel_is_the_derivative_of_the_arcsine_kernel() -> None:
    """d/dc of (2 / pi) asin(2 c / sqrt((1 + 2 p)(1 + 2 q))) is E[sigma'(u) sigma'(v)] (Price's theorem)."""
    x = sphere(5, 4)[0] * 1.3
    c = (x @ x.T).requires_grad_()
    p = c.detach().diagonal()
    arcsine = 2 / math.pi * torch.asin(2 * c / ((1 + 2 * p[:, None]) * (1 + 2 * p[None, :])).sqrt())
    (derivative,) = torch.autograd.grad(arcsine.sum(), c)
    torch.testing.assert_close(limit_kernel(x, "erf").K, derivative * c.detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("activation", SMOOTH)
def test_kernel_is_symmetric_and_positive(activation: str) -> None:
    kernel = limit_kernel(sphere()[0], activation)
    assert torch.equal(kernel.K, kernel.K.T)
    assert kernel.lambda_0 > 1e6 * kernel.lambda_0_error
    assert kernel.lambda_0_error < 1e-10


@pytest.mark.parametrize("activation", SMOOTH)
def test_gram_tends_to_the_kernel(activation: str) -> None:
    """|G_0 - K| = O(n sqrt(log n / M)): slope -1/2 against M; issue 5 asks for -0.6 to -0.4."""
    x, _ = sphere()
    K = limit_kernel(x, activation).K
    widths = (128, 512, 2048, 8192)
    norms = [
        statistics.median(
            float(torch.linalg.matrix_norm(gram(two_layer(M, 20, activation, seed), x) - K, ord=2))
            for seed in range(8)
        )
        for M in widths
    ]
    assert -0.6 < fitted_exponent(widths, norms) < -0.4


@pytest.mark.parametrize("sign", [1, -1])
def test_repeated_inputs_have_no_lambda_0(sign: int) -> None:
    """Zero up to the stated error, and a warning that names the rows; opposite inputs too, as sigma' is even."""
    x = sphere(30)[0]
    x = torch.cat([x, sign * x[4:6]])
    with pytest.warns(UserWarning, match=r"lambda_0 is zero .*rows 4 and 30 of x are equal or opposite"):
        kernel = limit_kernel(x, "tanh")
    assert abs(kernel.lambda_0) <= kernel.lambda_0_error
