"""Rates out of made-up sequences, and bad input to the theory: one message, never a bare linear-algebra error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gramgn.models import TwoLayer
from gramgn.theory import (
    best_learning_rate,
    contraction,
    fitted_exponent,
    follow,
    gauss_newton,
    gradient_descent,
    gram,
    jacobian,
    last_order,
    limit_kernel,
    linear_residuals,
    orders,
    quadratic_constants,
    spectral_radius,
    split,
)

X = torch.eye(4, 3, dtype=torch.float64) + 0.5
G = torch.eye(4, dtype=torch.float64) + 0.5


def net() -> TwoLayer:
    torch.manual_seed(0)
    return TwoLayer(3, width=8).double()


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_orders_of_a_power_law(p: float) -> None:
    """The law r' = C r^p has order p at every step."""
    r = [0.5]
    for _ in range(3):
        r.append(0.7 * r[-1] ** p)
    assert orders(r) == pytest.approx([p, p])


def test_last_order_leaves_out_the_first_step_and_rounding() -> None:
    r = [50.0, 0.1, 0.01, 0.0001, 1e-8, 3e-15, 2e-15]
    assert last_order(r) == pytest.approx(2.0)
    assert last_order([50.0, 0.1, 0.05, 0.02, 1e-8], floor=1e-3) == pytest.approx(
        math.log(0.4) / math.log(0.5)
    )
    with pytest.raises(
        ValueError, match="three finite residuals above 1e-11 after the first step, and there are 2"
    ):
        last_order([1.0, 0.1, 0.001, 1e-12])


def test_orders_where_there_are_none() -> None:
    assert all(math.isnan(value) for value in orders([1.0, 1.0, 0.5]) + orders([1.0, 0.0, 0.5]))


def test_constants_of_a_quadratic_law() -> None:
    assert quadratic_constants([1.0, 0.25, 0.25 * 0.25**2, 0.0]) == pytest.approx([0.25, 0.25])


def test_contraction_of_an_oscillating_sequence() -> None:
    """Factors of 0.8 with a period of two epochs: the geometric mean is 0.8; what comes before does not count."""
    r = [1e6, 1e3] + [0.8**t * (1.1 if t % 2 else 1.0) for t in range(9)]
    assert contraction(r) == pytest.approx((r[-1] / r[5]) ** (1 / 5))
    assert contraction([0.8**t for t in range(9)]) == pytest.approx(0.8)
    assert contraction([1.0, 0.1, 0.01, 1e-3, 1e-12, 1e-12]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="at least two epochs that end finite and above 1e-11, got 1"):
        contraction([1.0, 0.1, 1e-12])


def test_what_diverged_has_no_rate() -> None:
    """Not nan, which a median would hide; a residual of zero neither."""
    for end in (math.inf, math.nan):
        with pytest.raises(ValueError, match="end finite and above 1e-11, got 1"):
            contraction([1.0, 2.0, end, end, end])
        with pytest.raises(ValueError, match="three finite residuals"):
            last_order([1.0, 2.0, 3.0, end, end])
    assert math.isnan(quadratic_constants([0.0, 1.0, 0.5])[0])


def test_fitted_exponent() -> None:
    assert fitted_exponent([1, 10, 100], [5.0, 0.5, 0.05]) == pytest.approx(-1.0)
    for sizes, values in (
        ([1, 1], [1.0, 2.0]),
        ([1, 2], [0.0, 1.0]),
        ([1, 2], [1.0]),
        ([1, 2], [1.0, math.inf]),
    ):
        with pytest.raises(ValueError, match="two different sizes"):
            fitted_exponent(sizes, values)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "float32 samples": (lambda: limit_kernel(X.float(), "erf"), r"x is float32.*trainer\.dtype=float64"),
    "a float32 network": (lambda: gram(TwoLayer(3, width=8), X), "the network's weight is float32"),
    "a float32 matrix": (lambda: split(G.float(), 2), "G is float32"),
    "an array": (lambda: limit_kernel(X.numpy(), "erf"), r"x must be a torch tensor, got ndarray.*as_tensor"),  # type: ignore[arg-type]
    "a list of targets": (
        lambda: follow(net(), X, [0.0] * 4, num_epochs=1),  # type: ignore[arg-type]
        "y must be a torch tensor, got list",
    ),
    "another network": (
        lambda: gram(torch.nn.Linear(3, 1).double(), X),  # type: ignore[arg-type]
        r"about gramgn\.models\.TwoLayer, got Linear",
    ),
    "samples that overflow": (lambda: limit_kernel(1e160 * X, "erf"), r"as large as 1\.5e\+160.*scale"),
    "samples that vanish": (lambda: limit_kernel(1e-100 * X, "relu"), "row 0 of x is zero up to rounding"),
    "a nan": (lambda: jacobian(net(), X * math.nan), "not finite"),
    "one sample without its dimension": (lambda: gram(net(), X[0]), r"samples \[n, d\].*\[3\]"),
    "other features": (lambda: gram(net(), X[:, :2]), "x has 2 features, the network takes 3"),
    "another activation": (
        lambda: limit_kernel(X, "sigmoid"),
        "erf, tanh, softplus, gelu, relu, got 'sigmoid'",
    ),
    "a zero input": (
        lambda: limit_kernel(X * torch.tensor([[1], [1], [0], [1]]), "erf"),
        "row 2 of x is zero",
    ),
    "no terms": (
        lambda: limit_kernel(X, "tanh", num_terms=0),
        "num_terms must be a whole number of at least 1, got 0",
    ),
    "half a term": (lambda: limit_kernel(X, "tanh", num_terms=1.5), r"num_terms must be a whole.*got 1\.5"),  # type: ignore[arg-type]
    "even nodes": (lambda: limit_kernel(X, "tanh", num_nodes=100), "num_nodes must be odd, got 100"),
    "a rectangle": (lambda: split(G[:3], 2), r"square matrix \[n, n\], got shape \[3, 4\]"),
    "no symmetry": (lambda: split(G.triu(), 2), "G must be symmetric"),
    "no symmetry in a step": (lambda: gauss_newton(G.triu()), "G must be symmetric"),
    "no symmetry in a rate": (lambda: best_learning_rate(G.triu()), "G must be symmetric"),
    "a negative block": (lambda: split(-G, 2), "the block of batch 0 .* has the eigenvalue -2, and a Gram"),
    "a negative matrix": (lambda: gradient_descent(-G, lr=0.1), "G has the eigenvalue -3, and a Gram matrix"),
    "an endless alpha": (lambda: gauss_newton(G, alpha=math.inf), "both finite"),
    "an endless rate": (lambda: gradient_descent(G, lr=math.inf), "lr must be above 0 and finite"),
    "no batch": (lambda: split(G, 0), "batch_size must be a whole number of at least 1, got 0"),
    "half a batch": (lambda: split(G, 1.5), "got 1.5"),  # type: ignore[arg-type]
    "another method": (lambda: spectral_radius(split(G, 2), method="qr"), "auto, dense, sparse, got 'qr'"),
    "other residuals": (
        lambda: linear_residuals(split(G, 2), X[:, 0][:3], 1),
        r"residuals \[4\], got shape \[3\]",
    ),
    "residuals to apply": (
        lambda: split(G, 2).apply(X[:3]),
        r"r must be residuals \[4\].*got shape \[3, 3\]",
    ),
    "negative steps": (
        lambda: gauss_newton(G).residuals(X[:, 0], -1),
        "num_steps must be a whole number of at least 0, got -1",
    ),
    "negative epochs": (
        lambda: linear_residuals(split(G, 2), X[:, 0], -1),
        "num_epochs must be a whole number of at least 0, got -1",
    ),
    "other targets": (lambda: follow(net(), X, X, num_epochs=1), r"targets \[4\], one for each row"),
    "another order": (lambda: follow(net(), X, X[:, 0], num_epochs=1, order="random"), "cyclic, shuffle"),
    "no epochs": (lambda: follow(net(), X, X[:, 0], num_epochs=0), "at least 1"),
    "half an epoch": (lambda: follow(net(), X, X[:, 0], num_epochs=1.5), r"num_epochs must be .* got 1\.5"),  # type: ignore[arg-type]
    "half of a batch": (
        lambda: follow(net(), X, X[:, 0], num_epochs=1, batch_size=2.5),  # type: ignore[arg-type]
        r"batch_size must be a whole number of at least 1, got 2\.5",
    ),
    "no seed": (lambda: follow(net(), X, X[:, 0], num_epochs=1, seed=None), "seed must be .* got None"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_message(case: str) -> None:
    function, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        function()


def test_scipy_missing_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    splitting = split(torch.eye(40, dtype=torch.float64) + 0.5, 4)
    with pytest.raises(ImportError, match=r"needs scipy.*\[theory\].*method='dense'"):
        spectral_radius(splitting, method="sparse")


def test_relu_is_allowed() -> None:
    """Its kernel has a closed form too; the network warns when it is made."""
    assert limit_kernel(X, "relu").method == "closed form"
