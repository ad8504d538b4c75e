"""The options of the streaming engine change memory, speed and precision, but not the mathematics."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from cases import CASES_BY_NAME, Problem, all_trained, flattened, relative_error, vjp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optim_engines import TOLERANCE, assert_right, linearised, of_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramgn import GramGaussNewton
from gramgn.models import ResNetFixup
from gramgn.optim import Stream
from gramgn.optim.stream import BACKENDS, CONV_PATHS, PATHS, StreamEngine

# Some networks of the table contain modules without a rule on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")


class Watch(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(storage.nbytes() for storage in storages)])
        return result


class Experts(nn.Module):
    """Each sample of several tokens goes to one of two layers, and all to a third one, as `chosen` says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gain, self.last = nn.Parameter(torch.randn(5)), nn.Linear(5, 1)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (samples,) = torch.where(chosen == number)
            if len(samples):
                y = y.index_add(0, samples, torch.tanh(expert(x[samples])) * self.gain)
        return self.last(y).flatten(1)[:, :1]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_chunks_may_use_different_layers(num_tokens: int) -> None:
    """The rows of a layer are zero for the samples of a chunk that does not use it, also in memory that is reused."""
    torch.manual_seed(0)
    model, engine = Experts().double(), Stream(chunk_size=2).build()
    x = torch.randn(5, num_tokens, 5, dtype=torch.float64)
    for chosen in ([0, 1, 0, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [1, 1, 1, 1, 0]):
        assert_right(Problem(model, (x, torch.tensor(chosen)), torch.sin), engine)


def test_chunks_bound_the_activations() -> None:
    """G02: the forward pass sees a chunk at a time, with a smaller rest."""
    problem, sizes = CASES_BY_NAME["resnet_fixup"].make(), []
    problem.model.stem.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    engine = Stream(chunk_size=2).build()
    for _ in range(2):
        linearised(problem, engine)
        # The first steps compare with autograd's passes over other chunks.
        assert sizes == [2, 2, 1, 4, 1, 5]
        sizes.clear()
    linearised(problem, engine)
    assert sizes == [2, 2, 1]


def test_a_shared_tensor_as_long_as_the_batch_is_not_split_silently() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.layer(x) @ table.sum(dim=0)

    args = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="within a batch"):
        linearised(Problem(Shared().double(), args, torch.sin), Stream(chunk_size=2).build())


def test_auto_takes_what_fits_and_remembers() -> None:
    problem, engine = CASES_BY_NAME["resnet_fixup"].make(), Stream(chunk_size="auto").build()
    linearised(problem, engine)
    state = engine.state_dict()
    assert state["samples_at_a_time"] == {5: 5}
    sizes: list[int] = []
    problem.model.stem.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    resumed = Stream(chunk_size="auto").build()
    resumed.load_state_dict({**state, "samples_at_a_time": {5: 2}})
    linearised(problem, resumed)
    assert sizes[:3] == [2, 2, 1]
    assert resumed.state_dict()["samples_at_a_time"] == {5: 2}


def test_auto_counts_what_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(1, 1000), nn.Tanh(), nn.Linear(1000, 1)).double()
    # The output of tanh, once although two layers save it, and the inputs; weights do not count.
    per_sample = 8 * 1000 + 8 * 20
    for free, b, expected in ((40 * per_sample, 20, 10), (40 * per_sample, 7, 7), (1, 7, 1)):
        monkeypatch.setattr("gramgn.optim.runtime.free_bytes", lambda _, free=free: free)
        x, engine = torch.randn(b, 1, dtype=torch.float64), Stream(chunk_size="auto").build()
        of_model(model, lambda x=x: model(x), engine)
        assert engine.state_dict()["samples_at_a_time"] == {b: expected}


def test_auto_leaves_no_trace_in_random_numbers_and_buffers() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model.register_buffer("calls", torch.zeros(()))
    model[1].register_forward_pre_hook(lambda *_: (model.calls.add_(1), None)[1])
    x = torch.ones(4, 4, dtype=torch.float64)
    engine = Stream(chunk_size="auto").build()
    residuals = []
    for _ in range(2):
        torch.manual_seed(3)
        residuals.append(of_model(model, lambda: model(x), engine).reading.residual)
    assert torch.equal(*residuals)
    assert model.calls == 2


def kept_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of CPU memory that are allocated by `run` and still held by what it returns."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = run()
    del result
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def test_least_memory_holds_no_block() -> None:
    """G02: the plain engine holds J, `least` holds less than any large block of it."""
    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.Flatten(), nn.Linear(1024, 1)).double()
    x = torch.randn(32, 16, 4, 4, dtype=torch.float64)
    J_bytes = len(x) * model[0].weight.nbytes
    held, dropped = (
        kept_bytes(lambda options=options: of_model(model, lambda: model(x), options.build()))
        for options in (Stream(), Stream(memory_budget="least"))
    )
    assert dropped < J_bytes / 2 < J_bytes <= held


def test_probing_times_once_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are part of the state, so that a resumed run uses the same kernels."""
    problem, engine = CASES_BY_NAME["resnet_fixup"].make(), Stream(conv_path="probe").build()
    linearised(problem, engine)
    choices = engine.state_dict()["conv_paths"]
    assert choices
    assert set(choices.values()) <= set(PATHS)

    def no_clock() -> float:
        raise AssertionError("timed again")

    monkeypatch.setattr(time, "perf_counter", no_clock)
    linearised(problem, engine)
    resumed = Stream(conv_path="probe").build()
    resumed.load_state_dict(engine.state_dict())
    linearised(problem, resumed)
    # A choice that does not apply here is not trusted.
    resumed.load_state_dict(engine.state_dict() | {"conv_paths": dict.fromkeys(choices, "gone")})
    with pytest.raises(AssertionError, match="timed again"):
        linearised(problem, resumed)


@pytest.mark.parametrize("conv_path", CONV_PATHS)
def test_conv_paths_agree(conv_path: str) -> None:
    for name in ("padded_convolutions", "resnet_gn", "sequence", "convolution_twice"):
        case = CASES_BY_NAME[name]
        assert_right(case.make(), StreamEngine(conv_path=conv_path), case.jacobian())


def test_copies_hold_no_buffers() -> None:
    problem = CASES_BY_NAME["resnet_fixup"].make()
    optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, damping_convention="sum")
    before = len(pickle.dumps((problem.model, optimizer)))
    optimizer.step(problem.closure)
    J_bytes = CASES_BY_NAME["resnet_fixup"].jacobian().numel() * 8
    assert len(pickle.dumps((problem.model, optimizer))) < before + J_bytes / 4
    model, copied = copy.deepcopy((problem.model, optimizer))
    assert len(pickle.dumps((model, copied))) < before + J_bytes / 4
    copied.step(lambda: problem.residual(model(*problem.args)))
    optimizer.step(problem.closure)
    assert torch.equal(flattened(model.parameters()), flattened(problem.model.parameters()))


class Language(nn.Module):
    """A large table, a linear layer over places, and an average."""

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
    chunk_size=st.sampled_from([None, 2]),
)
def test_tables_and_layers_over_places(
    b: int, places: int, outputs: int, entries: int, padding: int | None, chunk_size: int | None
) -> None:
    """Embeddings and linear layers as factors and as blocks, whichever is smaller."""
    torch.manual_seed(0)
    model = Language(entries, 5, outputs, padding).double()
    tokens = torch.randint(0, entries, (b, places))
    assert_right(Problem(model, (tokens,), torch.sin), Stream(chunk_size=chunk_size).build())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2), st.booleans())
def test_linear_layers_of_any_leading_shape(b: int, k: int, middle: list[int], bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4, bias=bias), nn.ReLU(inplace=True), nn.Linear(4, k, bias=bias)
    ).double()
    x = torch.randn(b, *middle, 3, dtype=torch.float64)
    assert_right(Problem(model, (x,), lambda f: f.reshape(b, -1, k).sum(dim=1).sin()), Stream().build())


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Language(20_000, 8, 1, None), torch.arange(12).view(4, 3)),
        (nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)), torch.ones(4, 300)),
    ],
    ids=["table", "linear"],
)
def test_large_tables_and_linear_layers_are_not_expanded(model: nn.Module, x: Tensor) -> None:
    """The Hadamard form of G: only inputs and output gradients are held, never the block itself."""
    largest_weight = max(param.nbytes for param in model.parameters())
    engine = Stream().build()
    for _ in range(2):
        of_model(model, lambda: model(x), engine)  # the first steps compare with autograd's sums
    with Watch() as watch:
        of_model(model, lambda: model(x), engine).gram()
    assert watch.largest <= largest_weight


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(("width", "k"), [(90, 1), (110, 3), (620, 1)])
def test_wide_linear_layers_in_float32(width: int, k: int, kernels: str) -> None:
    """Products of factors are formed in other ways from certain sizes on, with compiled kernels earlier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, k, bias=False))
    model[0].bias.requires_grad_(k > 1)
    x, exact = torch.randn(128, width), copy.deepcopy(model).double()
    G = of_model(model, lambda: model(x), Stream(kernels=kernels).build()).gram()[0]
    expected = of_model(exact, lambda: exact(x.double()), Stream(kernels="off").build()).gram()[0]
    assert relative_error(G, expected) < 1e-6
    assert torch.equal(G, G.T)


class Quadratic(nn.Bilinear):
    """A module without a rule, with an operation for which torch has the only formula."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)


def test_modules_without_a_rule_are_named_once() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), Quadratic(4, 4, 4), nn.Linear(4, 4), Quadratic(4, 4, 4), nn.Linear(4, 1)
    ).double()
    x, engine = torch.randn(5, 3, dtype=torch.float64), Stream().build()
    with pytest.warns(UserWarning, match=r"no rule for Quadratic \(at '1', '3'\)"):
        of_model(model, lambda: model(x), engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        J = of_model(model, lambda: model(x), engine)
    assert relative_error(J.gram()[0], dense_gram(model, x)) < TOLERANCE


class Initialised(nn.LayerNorm):
    """Computes what its base class computes."""

    def __init__(self) -> None:
        super().__init__(5)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)
        nn.init.constant_(self.bias, 0.5)


class Doubled(nn.LayerNorm):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Positive(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.exp())


@pytest.mark.parametrize("layer", [Initialised(), Doubled(5), Positive(5)])
def test_a_subclass_has_the_rule_of_its_base_class_only_if_it_computes_the_same(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(5, 5), layer, nn.Flatten(), nn.Linear(20, 2)).double()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    assert_right(Problem(model, (x,), torch.sin), Stream().build())


def dense_gram(model: nn.Module, x: Tensor) -> Tensor:
    J = Problem(model, (x,), lambda f: f).dense_jacobian()
    return J @ J.T


def test_bfloat16_jacobians_stay_within_their_bound() -> None:
    """jacobian_dtype: J in bfloat16 by autocast, products in float32, off by a few parts in a thousand."""
    torch.manual_seed(0)
    model = ResNetFixup(8, width=8, in_channels=1, zero_last_layer=False)
    x = torch.randn(6, 1, 16, 16)
    exact = Problem(copy.deepcopy(model).double(), (x.double(),), lambda f: f).dense_jacobian()
    J = of_model(model, lambda: model(x), Stream(jacobian_dtype="bfloat16").build())
    assert 1e-6 < relative_error(J.gram()[0], exact @ exact.T) < 0.02
    assert J.eps >= 3e-3
    u = torch.randn(6, dtype=torch.float64)
    pulled = flattened(vjp(J, all_trained(model), u))
    assert relative_error(pulled, exact.T @ u) < 0.05
    assert pulled.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"memory_budget": "least"}], ids=str)
def test_bfloat16_with_every_mode(options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Flatten(), nn.Linear(8, 1))
    x = torch.randn(5, 8)
    expected = dense_gram(copy.deepcopy(model).double(), x.double())
    engine = Stream(jacobian_dtype="bfloat16", **options).build()
    J = of_model(model, lambda: model(x).float(), engine)
    assert relative_error(J.gram()[0], expected) < 0.03
    assert all(torch.isfinite(part).all() for part in vjp(J, all_trained(model), torch.ones(5)))


def test_many_pairs_of_places_are_multiplied_some_at_a_time() -> None:
    """More pairs of (sample, place) than are multiplied at once, 2^24."""
    torch.manual_seed(0)
    table = nn.Embedding(5000, 1)
    tokens = torch.randint(0, 5000, (65, 64))
    J = of_model(table, lambda: table(tokens).tanh().sum(dim=(1, 2)), Stream().build())
    slopes = 1 - torch.tanh(table.weight.detach().double()[tokens, 0]) ** 2
    expected = torch.zeros(65, 5000, dtype=torch.float64).scatter_add(1, tokens, slopes)
    assert relative_error(J.gram()[0], expected @ expected.T) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_preferred_backend_is_part_of_the_state(backend: str) -> None:
    """G09: a run that is resumed on another processor computes by the rules with which it began."""
    engine = StreamEngine(backend=backend)
    other = Stream().build()
    other.load_state_dict(engine.state_dict())
    assert other.state_dict()["backend"] == backend
    case = CASES_BY_NAME["resnet_fixup"]
    assert_right(case.make(), engine, case.jacobian())
