"""What the options of the streaming engine change: memory, speed and precision, but not the mathematics."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases import CASES, CASES_BY_NAME, Case, Problem, all_trained, vjp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn.models import ResNetFixup
from gramgn.optim import LoopEngine, runtime
from gramgn.optim.closure import Trained
from gramgn.optim.gram import Linearisation
from gramgn.optim.losses import CrossEntropy, SquaredError
from gramgn.optim.stream import CONV_PATHS, PATHS, StreamEngine, blocks, conv
from gramgn.optim.stream.jacobian import GraphJacobian

TOLERANCE = 1e-10
SQUARED = SquaredError()

# Networks of the table that are made to have modules without a rule.
pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


def linearised(problem: Problem, engine: StreamEngine) -> Linearisation:
    return engine.linearise(problem.model, problem.trained(), problem.closure, SQUARED)


def assert_right(problem: Problem, engine: StreamEngine) -> None:
    """Compare G, J d and J^T u with the Jacobian of the whole batch."""
    J, expected = linearised(problem, engine), problem.dense_jacobian()
    params = list(problem.trained().params.values())
    assert relative_error(J.gram()[0], expected @ expected.T) < TOLERANCE
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(len(expected), dtype=torch.float64, generator=generator)
    pulled = torch.cat([part.flatten() for part in vjp(J, problem.trained(), u)])
    assert relative_error(pulled, expected.T @ u) < TOLERANCE
    d = [torch.randn(param.shape, dtype=torch.float64, generator=generator) for param in params]
    flat = torch.cat([part.flatten() for part in d])
    assert relative_error(J.jvp(d), expected @ flat) < TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_with_the_jacobian(case: Case) -> None:
    assert_right(case.make(), StreamEngine())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_chunks_equal_the_whole(case: Case, chunk_size: int) -> None:
    """G02: samples at a time, with an odd rest, twice with the same memory."""
    problem, engine = case.make(), StreamEngine(chunk_size=chunk_size)
    for _ in range(2):
        assert_right(problem, engine)


def test_chunks_bound_the_activations() -> None:
    """G02: the forward pass sees a chunk at a time."""
    problem, sizes = CASES_BY_NAME["resnet_fixup"].make(), []
    problem.model.stem.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    engine = StreamEngine(chunk_size=2)
    engine._compared.add((True,))
    linearised(problem, engine)
    assert sizes == [2, 2, 1]


def test_a_shared_tensor_as_long_as_the_batch_is_not_cut_silently() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.layer(x) @ table.sum(dim=0)

    model = Shared().double()
    args = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="other outputs within a batch"):
        linearised(Problem(model, args, torch.sin), StreamEngine(chunk_size=2))


def test_auto_takes_what_fits_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, engine = CASES_BY_NAME["resnet_fixup"].make(), StreamEngine(chunk_size="auto")
    monkeypatch.setattr(runtime, "free_bytes", lambda _: 10**12)
    assert_right(problem, engine)
    assert engine.state_dict()["samples_at_a_time"] == {5: 5}
    small = StreamEngine(chunk_size="auto")
    monkeypatch.setattr(runtime, "free_bytes", lambda _: 1)
    assert_right(problem, small)
    assert small.state_dict()["samples_at_a_time"] == {5: 1}
    resumed = StreamEngine(chunk_size="auto")
    resumed.load_state_dict(engine.state_dict())
    assert_right(problem, resumed)
    assert resumed.state_dict() == engine.state_dict()


def test_auto_counts_what_autograd_saves() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1)).double()
    x = torch.randn(1, 1000, dtype=torch.float64)
    # The input, the tanh's output (kept once, for itself and for the last layer): 16 kB; weights don't count.
    per_sample = 2 * 8 * 1000
    free = 10 * per_sample * runtime.MEMORY_SHARE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "free_bytes", lambda _: free)
        assert runtime.samples_that_fit(100, model, lambda: model(x)) == 10
        assert runtime.samples_that_fit(7, model, lambda: model(x)) == 7
    assert runtime.free_bytes(torch.device("cpu")) > 2**20


def test_auto_draws_no_random_numbers_from_the_user() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)).double()
    x = torch.ones(4, 4, dtype=torch.float64)
    engine = StreamEngine(chunk_size="auto")
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        J = engine.linearise(model, all_trained(model), lambda: model(x), SQUARED)
        results.append(J.reading.residual)
    assert torch.equal(*results)


LOW_MEMORY = tuple(
    case for case in CASES if case.make().residual_at(case.make().flat()).numel() == len(case.make().args[0])
)


@pytest.mark.parametrize("case", LOW_MEMORY, ids=lambda case: case.name)
def test_low_memory_equals_the_rest(case: Case) -> None:
    problem, engine = case.make(), StreamEngine(low_memory=True)
    for _ in range(2):
        assert_right(problem, engine)


def test_low_memory_holds_no_block() -> None:
    problem, engine = CASES_BY_NAME["resnet_gn"].make(), StreamEngine(low_memory=True)
    J = linearised(problem, engine)
    assert isinstance(J.jacobian, GraphJacobian)
    assert not any(key[0] == "J" for key in engine._memories.buffers._flat)
    assert not engine._memories.buffers._kept


def test_low_memory_refuses_several_residuals() -> None:
    with pytest.raises(ValueError, match="one residual for each sample, got 3"):
        linearised(CASES_BY_NAME["mlp_three_outputs"].make(), StreamEngine(low_memory=True))


def test_probing_times_once_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are part of the state, so that a resumed run takes the same kernels."""
    problem, engine = CASES_BY_NAME["resnet_fixup"].make(), StreamEngine(conv_path="probe")
    assert_right(problem, engine)
    choices = engine.state_dict()["conv_paths"]
    assert choices
    assert set(choices.values()) <= set(PATHS)

    def no_clock() -> float:
        raise AssertionError("timed again")

    monkeypatch.setattr(conv.time, "perf_counter", no_clock)
    assert_right(problem, engine)
    resumed = StreamEngine(conv_path="probe")
    resumed.load_state_dict(engine.state_dict())
    assert_right(problem, resumed)
    # A choice that does not apply here, from another version, is not trusted.
    resumed.load_state_dict({"conv_paths": dict.fromkeys(choices, "gone"), "samples_at_a_time": {}})
    with pytest.raises(AssertionError, match="timed again"):
        linearised(problem, resumed)


@pytest.mark.parametrize("conv_path", CONV_PATHS)
def test_conv_paths_agree(conv_path: str) -> None:
    for name in ("padded_convolutions", "resnet_gn", "sequence", "convolution_twice"):
        assert_right(CASES_BY_NAME[name].make(), StreamEngine(conv_path=conv_path))


def in_groups(problem: Problem, num_groups: int) -> Trained:
    params = problem.trained().params
    return Trained(params, tuple(i % num_groups for i in range(len(params))), num_groups)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=["whole", "chunks"])
def test_gram_matrices_of_groups(case: Case, options: dict) -> None:
    problem = case.make()
    trained, expected = in_groups(problem, 3), problem.dense_jacobian()
    J = StreamEngine(**options).linearise(problem.model, trained, problem.closure, SQUARED)
    columns = expected.split([param.numel() for param in trained.params.values()], dim=1)
    for group, G in enumerate(J.gram()):
        own = [part for part, of in zip(columns, trained.groups, strict=True) if of == group]
        dense = sum((part @ part.T for part in own), torch.zeros_like(G))
        assert torch.allclose(G, dense, rtol=1e-9, atol=1e-9 * float(expected.square().sum()))


def test_scales_are_by_parameter() -> None:
    problem = CASES_BY_NAME["resnet_fixup"].make()
    trained, J = problem.trained(), linearised(problem, StreamEngine())
    u = torch.randn(5, dtype=torch.float64)
    out = [torch.ones_like(param) for param in trained.params.values()]
    scales = [0.5 * (i % 3) - 0.5 for i in range(len(out))]
    J.add_vjp_(out, u, scales)
    for changed, pulled, scale in zip(out, vjp(J, trained, u), scales, strict=True):
        assert torch.allclose(changed, 1 + scale * pulled)


class Language(nn.Module):
    """A large table, a linear layer over places, an average."""

    def __init__(self, entries: int, features: int, outputs: int, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, features, padding_idx=padding)
        self.layer, self.last = nn.Linear(features, 7), nn.Linear(7, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(self.table(tokens))).mean(dim=1))


@settings(max_examples=25, deadline=None)
@given(
    b=st.integers(1, 5),
    places=st.integers(1, 4),
    outputs=st.integers(1, 3),
    entries=st.sampled_from([3, 50]),
    padding=st.sampled_from([None, 0]),
    pairs=st.sampled_from([1, 2**24]),
    chunk_size=st.sampled_from([None, 2]),
)
def test_tables_and_layers_over_places(
    b: int, places: int, outputs: int, entries: int, padding: int | None, pairs: int, chunk_size: int | None
) -> None:
    """Embeddings and linear layers as factors and as blocks, whichever is smaller."""
    torch.manual_seed(0)
    model = Language(entries, 5, outputs, padding).double()
    tokens = torch.randint(0, entries, (b, places))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MOST_PAIRS", pairs)
        assert_right(Problem(model, (tokens,), torch.sin), StreamEngine(chunk_size=chunk_size))


def test_a_large_table_is_not_expanded() -> None:
    """The block of a table of 20,000 entries would take 4 x 20,000 x 8 numbers."""
    model = Language(20_000, 8, 1, None).double()
    tokens = torch.randint(0, 20_000, (4, 3))
    J = linearised(Problem(model, (tokens,), torch.sin), StreamEngine())
    assert "table" in J.jacobian.accumulated.factors
    assert "table.weight" not in J.jacobian.accumulated.held


@pytest.mark.parametrize("engine", [StreamEngine(), StreamEngine(chunk_size=2)], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["mlp_three_outputs", "resnet_fixup_two_outputs", "tied_weights"])
def test_cross_entropy_equals_the_oracle(engine: StreamEngine, name: str) -> None:
    problem = CASES_BY_NAME[name].make()
    outputs = problem.model(*problem.args)
    labels = torch.arange(len(outputs)) % outputs.shape[1]

    def closure() -> tuple[Tensor, Tensor]:
        return problem.model(*problem.args), labels

    J, oracle = (
        each.linearise(problem.model, problem.trained(), closure, CrossEntropy())
        for each in (engine, LoopEngine())
    )
    assert relative_error(J.gram()[0], oracle.gram()[0]) < TOLERANCE
    assert torch.allclose(J.reading.residual, oracle.reading.residual)
    u = torch.randn(outputs.numel(), dtype=torch.float64)
    for pulled, expected in zip(vjp(J, problem.trained(), u), vjp(oracle, problem.trained(), u), strict=True):
        assert torch.allclose(pulled, expected, rtol=1e-9, atol=1e-10)


def test_modules_without_a_rule_are_named_once() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 1)
    ).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    engine = StreamEngine()
    with pytest.warns(UserWarning, match=r"no rule for PReLU \(at '3'\)"):
        J = engine.linearise(model, all_trained(model), lambda: model(x), SQUARED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.linearise(model, all_trained(model), lambda: model(x), SQUARED)
    assert relative_error(J.gram()[0], dense_gram(model, x)) < TOLERANCE


def dense_gram(model: nn.Module, x: Tensor) -> Tensor:
    J = Problem(model, (x,), lambda f: f).dense_jacobian()
    return J @ J.T


def test_bfloat16_jacobians_stay_within_their_bound() -> None:
    """jacobian_dtype: J in bfloat16 by autocast, G's product in float32, off by a few parts in a thousand."""
    torch.manual_seed(0)
    model = ResNetFixup(8, width=8, in_channels=1, zero_last_layer=False)
    x = torch.randn(6, 1, 16, 16)
    exact = copy.deepcopy(model).double()
    expected = dense_gram(exact, x.double())
    J = StreamEngine(jacobian_dtype=torch.bfloat16).linearise(
        model, all_trained(model), lambda: model(x), SQUARED
    )
    error = relative_error(J.gram()[0], expected)
    assert 1e-6 < error < 0.02
    assert J.eps >= 3e-3
    assert {held.rows.dtype for held in J.jacobian.accumulated.held.values()} == {torch.bfloat16}
    u = torch.randn(6, dtype=torch.float64)
    pulled = torch.cat([part.flatten() for part in vjp(J, all_trained(model), u)])
    right = Problem(exact, (x.double(),), lambda f: f).dense_jacobian().T @ u
    assert relative_error(pulled, right) < 0.05
    assert pulled.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"low_memory": True}], ids=str)
def test_bfloat16_with_every_mode(options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Flatten(), nn.Linear(8, 1))
    x = torch.randn(5, 8)
    expected = dense_gram(copy.deepcopy(model).double(), x.double())
    engine = StreamEngine(jacobian_dtype=torch.bfloat16, **options)
    J = engine.linearise(model, all_trained(model), lambda: model(x).float(), SQUARED)
    assert relative_error(J.gram()[0], expected) < 0.03
    assert all(torch.isfinite(part).all() for part in vjp(J, all_trained(model), torch.ones(5)))
