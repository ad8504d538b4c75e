"""The split and the iteration matrix: against dense algebra, and against the optimizer on a linearised network."""

from __future__ import annotations

import math

import pytest
import torch
from theory_cases import sphere, two_layer
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.theory import Splitting, gram, jacobian, linear_residuals, predict, spectral_radius, split

SIZES = [(40, 1), (40, 7), (40, 20), (40, 39), (40, 40), (40, 100), (41, 20)]


def splitting_of(n: int, b: int, M: int = 64) -> Splitting:
    return split(gram(two_layer(M), sphere(n)[0]), b)


def epoch_of_ggn(J: Tensor, r: Tensor, batches: list[Tensor]) -> Tensor:
    """Return the residuals r + J (w - w_0) after one GGN step on each batch, in order, lam = 1 and alpha = 0."""
    linearised = nn.Linear(J.shape[1], 1, bias=False).double()
    nn.init.zeros_(linearised.weight)
    optimizer = GramGaussNewton(linearised, lam=1.0, alpha=0.0)
    for rows in batches:
        optimizer.step(lambda rows=rows: linearised(J[rows])[:, 0] + r[rows])
    return (linearised(J)[:, 0] + r).detach()


@pytest.mark.parametrize(("n", "b"), SIZES)
def test_an_epoch_is_block_gauss_seidel(n: int, b: int) -> None:
    """Residuals go from r to A r, formula (7), to 1e-10: the optimizer's own steps, also with a smaller last batch."""
    x, y = sphere(n)
    model = two_layer(64)
    r = (model(x) - y).detach()
    after = epoch_of_ggn(jacobian(model, x), r, list(torch.arange(n).split(b)))
    splitting = split(gram(model, x), b)
    assert float((after - splitting.apply(r)).norm()) < 1e-10
    assert float((after - splitting.iteration_matrix() @ r).norm()) < 1e-10
    assert len(splitting.bounds) == math.ceil(n / b)


def test_another_order_of_the_batches_is_another_matrix() -> None:
    """Batches in another order are the same identity for the reordered G."""
    n, b = 40, 7
    x, y = sphere(n)
    model = two_layer(64)
    J, r, G = jacobian(model, x), (model(x) - y).detach(), gram(model, x)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    after = epoch_of_ggn(J, r, list(order.split(b)))
    own = split(G[order][:, order], b).apply(r[order])
    assert float((after[order] - own).norm()) < 1e-10
    assert float((after - split(G, b).apply(r)).norm()) > 1e-3


@pytest.mark.parametrize(("n", "b"), SIZES)
def test_split_and_matrix_are_the_definitions(n: int, b: int) -> None:
    """Formulas (6) and (7) by dense algebra, entry by entry."""
    splitting = splitting_of(n, b)
    D, L = torch.zeros_like(splitting.G), torch.zeros_like(splitting.G)
    for i in range(n):
        for j in range(n):
            if i // b == j // b:
                D[i, j] = splitting.G[i, j]
            elif i // b > j // b:
                L[i, j] = -splitting.G[i, j]
    assert torch.equal(splitting.D, D)
    assert torch.equal(splitting.L, L)
    assert torch.equal(splitting.G, D - L - L.T)
    A = L.T @ torch.linalg.inv(D - L)
    torch.testing.assert_close(splitting.iteration_matrix(), A, rtol=0, atol=1e-10)
    columns = torch.randn(n, 3, dtype=torch.float64)
    torch.testing.assert_close(splitting.apply(columns), A @ columns, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "b"), SIZES)
def test_spectral_radius_is_that_of_gauss_seidel(n: int, b: int) -> None:
    """A and the error iteration (D - L)^-1 L^T have the same one; below 1 because G is positive definite."""
    splitting = splitting_of(n, b)
    of_errors = torch.linalg.solve(splitting.D - splitting.L, splitting.L.T)
    rho = spectral_radius(splitting)
    assert rho == pytest.approx(float(torch.linalg.eigvals(of_errors).abs().max()), abs=1e-10)
    assert 0 <= rho < 1
    assert (rho == 0) == (b >= n)


def test_sparse_and_dense_agree() -> None:
    pytest.importorskip("scipy", reason="needs the extra theory: pip install -e .[theory]")
    splitting = splitting_of(150, 20, 256)
    dense, sparse = (spectral_radius(splitting, method=name) for name in ("dense", "sparse"))
    assert sparse == pytest.approx(dense, rel=1e-9)


@pytest.mark.parametrize("b", [1, 10, 25, 49])
def test_bound_holds_for_the_linearised_network(b: int) -> None:
    """|A^T r| <= mu_P rho^T |r|, formula (9), for any r; and mu_P is no larger than it needs to be."""
    splitting = splitting_of(50, b, 128)
    prediction = predict(splitting)
    assert prediction.rho == pytest.approx(spectral_radius(splitting), rel=1e-9)
    assert math.isfinite(prediction.mu_P)
    assert prediction.mu_P >= 1
    power = torch.eye(50, dtype=torch.float64)
    for num_epochs in range(1, 40):
        power = splitting.apply(power)
        assert float(torch.linalg.matrix_norm(power, ord=2)) <= prediction.bound(num_epochs) * (1 + 1e-9)


def test_mu_p_by_hand() -> None:
    """Two samples, b = 1: A = [[g^2, -g], [0, 0]] up to sign has eigenvectors e_1 and (1, g) normalised."""
    g = 0.6
    splitting = split(torch.tensor([[1.0, g], [g, 1.0]], dtype=torch.float64), 1)
    A = torch.tensor([[g * g, -g], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(splitting.iteration_matrix(), A)
    prediction = predict(splitting)
    cosine = 1 / math.sqrt(1 + g * g)  # of the angle between the eigenvectors for g^2 and for 0
    assert prediction.rho == pytest.approx(g * g)
    assert prediction.mu_P == pytest.approx(math.sqrt((1 + cosine) / (1 - cosine)))
    assert prediction.eigenvalues.abs().tolist() == pytest.approx([g * g, 0.0])


def test_one_batch_is_solved_in_one_epoch() -> None:
    prediction = predict(splitting_of(30, 30))
    assert (prediction.rho, prediction.mu_P) == (0.0, pytest.approx(1.0))


def test_repeated_inputs_in_two_batches_do_not_contract() -> None:
    """Documented: rho = 1. In one batch the block is singular: refused with its number."""
    x = sphere(30)[0]
    G = gram(two_layer(64), torch.cat([x, x[:2]]))
    assert spectral_radius(split(G, 16)) == pytest.approx(1.0, abs=1e-10)
    with pytest.raises(ValueError, match=r"batch 0 \(samples 0 to 31\) of G is singular.*repeated inputs"):
        split(G, 32)


def test_a_width_too_small_for_a_batch() -> None:
    """M d = 16 columns cannot give 20 independent rows, but do give 10: then G alone is singular, and rho = 1."""
    x = sphere(40, 4)[0]
    G = gram(two_layer(4, 4), x)
    with pytest.raises(ValueError, match=r"singular.*at least 20 weights"):
        split(G, 20)
    assert spectral_radius(split(G, 10)) == pytest.approx(1.0, abs=1e-10)


def test_batches_that_do_not_act_on_each_other() -> None:
    """A = 0: rho = 0 by either method, where the sparse one has nothing to iterate on."""
    splitting = split(torch.eye(40, dtype=torch.float64), 5)
    assert [spectral_radius(splitting, method=name) for name in ("dense", "sparse")] == [0.0, 0.0]


def test_linear_residuals_are_norms_of_powers() -> None:
    splitting = splitting_of(40, 10)
    r = torch.randn(40, dtype=torch.float64)
    A = splitting.iteration_matrix()
    expected = [float((torch.linalg.matrix_power(A, t) @ r).norm()) for t in range(6)]
    assert linear_residuals(splitting, r, 5) == pytest.approx(expected, rel=1e-9)
