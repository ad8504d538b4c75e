"""The solve: which way is taken when, that each is right, and that none changes the problem."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn import GramGaussNewton, SolveError
from gramgn.optim import Loop, Rows, Stream, Vmap, solve_system

Options = Stream | Vmap | Loop | Rows
EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a symmetric matrix with these eigenvalues, and its eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    V, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return (V * eigenvalues) @ V.T, V


def test_cholesky_keeps_all_directions() -> None:
    """Eigenvalues from 1e-3 to 1e7 at the paper's alpha: right in every direction, in float64."""
    g = torch.logspace(-3, 7, 64, dtype=torch.float64)
    G, V = with_spectrum(g)
    r = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solution = solve_system(G, r, lam=1.0, damping=0.3, eps=EPS64)
    expected = (V.T @ r) / (g + 0.3)
    assert solution.status == "cholesky"
    assert torch.allclose(V.T @ solution.u, expected, rtol=1e-5, atol=1e-9)
    assert not solution.ill_conditioned
    # The same G from a float32 Jacobian: its small end is rounding, which is said and not "repaired".
    single = solve_system(G, r, lam=1.0, damping=0.3, eps=EPS32)
    assert torch.equal(single.u, solution.u)
    assert single.ill_conditioned


def test_eigenvalues_are_the_fall_back_and_keep_all_directions() -> None:
    """G03: G indefinite by rounding (-1e-3 beside alpha 1e-4): clamped at 0, nothing cut, alpha kept."""
    g = torch.tensor([-1e-3, 0.0, 1.0, 1e5], dtype=torch.float64)
    G, V = with_spectrum(g)
    r = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solution = solve_system(G, r, lam=0.5, damping=1e-4, eps=EPS32)
    assert solution.status == "eigh"
    expected = (V.T @ r) / (0.5 * g.clamp(min=0) + 1e-4)
    assert torch.allclose(V.T @ solution.u, expected, rtol=1e-6)
    assert solution.ill_conditioned


@pytest.mark.parametrize("alpha", [0.0, 1e-16])
def test_minimum_norm_without_damping_to_speak_of(alpha: float) -> None:
    g = torch.tensor([0.0, 1e-9, 0.5, 3.0], dtype=torch.float64)
    G, V = with_spectrum(g)
    r = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solution = solve_system(G, r, lam=2.0, damping=alpha, eps=EPS32)
    assert solution.status == "minimum_norm"
    assert solution.ill_conditioned
    components = V.T @ solution.u
    assert torch.allclose(components[:2], torch.zeros(2, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(components[2:], (V.T @ r)[2:] / (2 * g[2:]), rtol=1e-12)


def test_minimum_norm_of_a_regular_system_is_its_solution() -> None:
    G, _ = with_spectrum(torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64))
    r = torch.ones(3, dtype=torch.float64)
    solution = solve_system(G, r, lam=1.0, damping=0.0, eps=EPS64)
    assert torch.allclose(G @ solution.u, r)
    assert not solution.ill_conditioned


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", [Stream(), Stream(memory_budget="least"), Vmap(), Loop(), Rows()])
@pytest.mark.parametrize("num_different", [1, 2])
def test_equal_samples_without_damping(dtype: torch.dtype, engine: Options, num_different: int) -> None:
    """Of 128 samples with 1 or 2 different ones G has that rank, and the step is that of least squares.

    Without the factor n in the cut, the other eigenvalues, which are rounding, give a step of noise.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    x = torch.randn(num_different, 3, dtype=dtype).repeat(128 // num_different, 1)
    y = torch.linspace(-1, 2, 128, dtype=dtype)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().double()
    precise = copy.deepcopy(model).double()
    gradients = [torch.autograd.grad(precise(each)[0], [*precise.parameters()]) for each in x.double()]
    J = torch.stack([torch.cat([each.flatten() for each in row]) for row in gradients])
    residual = precise(x.double())[:, 0].detach() - y.double()
    expected = torch.linalg.pinv(J, rtol=1e-5) @ residual
    info = GramGaussNewton(model, lam=1.0, alpha=0.0, engine=engine).step(lambda: model(x)[:, 0] - y)
    taken = before - nn.utils.parameters_to_vector(model.parameters()).detach().double()
    assert info.status == "minimum_norm"
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert float((taken - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize(("alpha", "status"), [(2.2, "cholesky"), (1.7, "minimum_norm")])
def test_damping_that_float64_cannot_hold_counts_as_none(alpha: float, status: str) -> None:
    """The border is n eps64 lam lambda_max = 4 x 2.2e-16 x 2 x 1e15 = 1.78, n the rows of G."""
    G = torch.diag(torch.tensor([1e15, 1e15, 1e15, 1e15], dtype=torch.float64))
    assert solve_system(G, torch.ones(4, dtype=torch.float64), 2.0, alpha, EPS64).status == status


@pytest.mark.parametrize(("factor", "flagged"), [(0.99, True), (1.01, False)])
def test_ill_conditioned_border(factor: float, flagged: bool) -> None:
    """The border is alpha = eps(J) lam lambda_max, by the true lambda_max and not by its bounds."""
    G, _ = with_spectrum(torch.tensor([1.0, 3.0, 900.0, 1000.0], dtype=torch.float64))
    solution = solve_system(G, torch.ones(4, dtype=torch.float64), 4.0, factor * EPS32 * 4 * 1000, EPS32)
    assert (solution.status, solution.ill_conditioned) == ("cholesky", flagged)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_all_zero_gram_matrix(alpha: float) -> None:
    """G07: a Jacobian of zeros (a dead first step) gives a finite u."""
    r = torch.ones(3, dtype=torch.float64)
    solution = solve_system(torch.zeros(3, 3, dtype=torch.float64), r, 1.0, alpha, EPS32)
    assert torch.allclose(solution.u, r / alpha if alpha else torch.zeros_like(r), rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("bad", ["G", "r", "damping"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_has_no_solution(bad: str, value: float) -> None:
    """G04: also a damping that overflowed, as one relative to the trace can."""
    given = {"G": torch.eye(3, dtype=torch.float64), "r": torch.ones(3, dtype=torch.float64), "damping": 0.3}
    if bad == "damping":
        given["damping"] = value
    else:
        given[bad][-1] = value
    solution = solve_system(**given, lam=1.0, eps=EPS64)
    assert solution.status == "non_finite"
    assert bool(torch.isnan(solution.u).all())


def test_a_gram_matrix_whose_norm_overflows() -> None:
    """Entries of 1e200 have a Frobenius norm beyond float64; what is solved is still right."""
    G = torch.diag(torch.tensor([1e200, 4e200], dtype=torch.float64))
    for alpha in (0.0, 1.0, 1e200):
        u = solve_system(G, torch.ones(2, dtype=torch.float64), 1.0, alpha, EPS64).u
        assert torch.allclose(u * 1e200, 1 / torch.tensor([1 + alpha / 1e200, 4 + alpha / 1e200]).double())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e8), st.integers(0, 5))
def test_small_eigenvalues_are_rounding_below_the_precision_of_j(
    g: list[float], damping: float, seed: int
) -> None:
    """Flagged where damping <= eps lambda_max, whether bounds of lambda_max decide or eigenvalues."""
    G, _ = with_spectrum(torch.tensor(g, dtype=torch.float64), seed)
    for eps in (1.0, EPS32, 1e-3):
        border = eps * max(g)
        if abs(damping - border) > 1e-9 * border:
            solution = solve_system(G, torch.ones(len(g), dtype=torch.float64), 1.0, damping, eps)
            assert solution.ill_conditioned == (damping < border)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.floats(1e-3, 1e3), st.floats(1e-6, 1e3), st.integers(0, 5))
def test_solve_solves(n: int, deficiency: int, lam: float, alpha: float, seed: int) -> None:
    """Whatever the rank of G: (lam G + alpha I) u = r."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(n, max(1, n - deficiency), generator=generator, dtype=torch.float64)
    r = torch.randn(n, generator=generator, dtype=torch.float64)
    solution = solve_system(J @ J.T, r, lam, alpha, EPS64)
    residue = lam * J @ (J.T @ solution.u) + alpha * solution.u - r
    assert float(residue.norm() / r.norm()) < 1e-6


def duplicates(
    alpha: float, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, GramGaussNewton, Tensor, Tensor]:
    """Return a batch of 4 with two identical samples that have opposite targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x = torch.randn(4, 3, dtype=dtype)
    x[1] = x[0]
    y = torch.tensor([[1.0], [-1.0], [0.5], [0.0]], dtype=dtype)
    return model, GramGaussNewton(model, lam=1.0, alpha=alpha, damping_convention="sum"), x, y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_duplicates_with_opposite_targets_without_damping(dtype: torch.dtype) -> None:
    """G03: the step is that of the batch with the pair replaced by its mean, and stays as small as that."""
    model, optimizer, x, y = duplicates(0.0, dtype)
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    with pytest.warns(RuntimeWarning, match="small eigenvalues of G"):
        info = optimizer.step(lambda: model(x) - y)
    moved = flat - torch.cat([param.detach().flatten() for param in model.parameters()])

    model, optimizer, x, y = duplicates(0.0, torch.float64)
    y[0] = y[:2].mean()
    optimizer.step(lambda: model(x[[0, 2, 3]]) - y[[0, 2, 3]])
    expected = flat.double() - torch.cat([param.detach().flatten() for param in model.parameters()])
    assert info.status == "minimum_norm"
    assert info.ill_conditioned
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    assert float((moved.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("engine", ["stream", "vmap", "loop"])
def test_equal_rows_without_damping_give_the_step_of_one(engine: str, dtype: torch.dtype) -> None:
    """128 equal rows: G has rank 1, and the rounding of its other eigenvalues is cut, as pinv does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    x, y = torch.randn(1, 8, dtype=dtype).repeat(128, 1), torch.randn(128, 1, dtype=dtype)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    grads = torch.autograd.grad(model(x[:1]).sum(), list(model.parameters()))
    row = torch.cat([grad.flatten() for grad in grads]).double()
    J, r = row.repeat(128, 1), (model(x) - y).detach().double()[:, 0]
    info = GramGaussNewton(model, lam=1.0, alpha=0.0, engine=engine).step(lambda: model(x) - y)
    step = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    expected = -torch.linalg.pinv(J) @ r
    assert info.ill_conditioned
    assert float((step.double() - expected).norm() / expected.norm()) < 1e3 * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alpha", [0.0, 1e-7, 1e-3, 1.0])
def test_near_singular_batches_give_finite_steps(alpha: float, dtype: torch.dtype) -> None:
    """G03: duplicates, a zero image and 1e4-scaled inputs, every alpha: never a bare linear-algebra error."""
    for change in ("duplicates", "zero", "scaled"):
        model, optimizer, x, y = duplicates(alpha, dtype)
        if change == "zero":
            x[2] = 0
        if change == "scaled":
            x *= 1e4
        for _ in range(3):
            info = optimizer.step(lambda model=model, x=x, y=y: model(x) - y)
            assert info.status in ("cholesky", "eigh", "minimum_norm")
        assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
        assert (
            sum(optimizer.counts[s] for s in ("cholesky", "eigh", "minimum_norm"))
            == optimizer.counts["steps"]
            == 3
        )


def test_fall_back_is_counted_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """G03, G04: a failing Cholesky leads to the eigenvalues and the very same step."""
    model, optimizer, x, y = duplicates(0.3)
    optimizer.step(lambda: model(x) - y)
    expected = [param.detach().clone() for param in model.parameters()]

    model, optimizer, x, y = duplicates(0.3)
    failed = torch.tensor(2, dtype=torch.int32)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda system: (system, failed))
    info = optimizer.step(lambda: model(x) - y)
    assert info.status == "eigh"
    assert optimizer.counts == {
        "steps": 1,
        "cholesky": 0,
        "eigh": 1,
        "minimum_norm": 0,
        "non_finite": 0,
        "ill_conditioned": 0,
        "rejected": 0,
        "given_up": 0,
    }
    for param, other in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(param, other, rtol=1e-10)


def test_final_failure_says_what_was_to_be_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """G03, G04: SolveError names step, alpha, lam, batch and condition; the parameters stay bitwise."""
    model, optimizer, x, y = duplicates(0.0)
    before = [param.detach().clone() for param in model.parameters()]

    def failing(_matrix: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.raises(
        SolveError, match=r"step 1: .*lam 1, alpha 0 .*batch size 4 .*condition .*not converge"
    ):
        optimizer.step(lambda: model(x) - y)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_minimum_norm_solution_reports_whether_it_cut() -> None:
    """The border is n eps lambda_max."""
    G = torch.diag(torch.tensor([1.0, 1e-3], dtype=torch.float64))
    r = torch.ones(2, dtype=torch.float64)
    assert solve_system(G, r, 1.0, 0.0, 0.49e-3).ill_conditioned is False
    assert solve_system(G, r, 1.0, 0.0, 0.51e-3).ill_conditioned is True
