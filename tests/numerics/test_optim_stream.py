"""The streaming engine forms the Jacobian of autograd on the whole batch, and refuses where it would not."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from cases import CASES, CASES_BY_NAME, Case, Problem, all_trained, vjp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gramgn import GramGaussNewton
from gramgn.optim import LoopEngine, Stream
from gramgn.optim.losses import SquaredError
from gramgn.optim.stream import PATHS, StreamEngine, StreamLinearisation
from gramgn.optim.stream import conv as conv_module

TOLERANCE = 1e-10


SQUARED = SquaredError()

# Networks of the table that are made to have modules without a rule.
pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")


def linearised(problem: Problem, engine: StreamEngine | None = None) -> StreamLinearisation:
    return (engine or StreamEngine()).linearise(problem.model, problem.trained(), problem.closure, SQUARED)


def of_model(model: nn.Module, closure, engine: StreamEngine | None = None) -> StreamLinearisation:
    return (engine or StreamEngine()).linearise(model, all_trained(model), closure, SQUARED)


def residual(J: StreamLinearisation) -> Tensor:
    return J.reading.residual


def dense(J: StreamLinearisation) -> Tensor:
    """Return J [b k, m] row by row."""
    rows = torch.eye(residual(J).numel(), dtype=torch.float64)
    return torch.stack([torch.cat([d.flatten() for d in vjp(J, J.trained, row)]) for row in rows])


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


def assert_right(problem: Problem, engine: StreamEngine | None = None) -> None:
    J, expected = linearised(problem, engine), problem.dense_jacobian()
    assert relative_error(dense(J), expected) < TOLERANCE
    assert relative_error(J.gram()[0], expected @ expected.T) < TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jacobian_and_gram_are_those_of_the_whole_batch(case: Case) -> None:
    """G01, G05, G06, G08, G17, G21: the table of cases, twice with the same engine."""
    problem, engine = case.make(), StreamEngine()
    for _ in range(2):
        assert_right(problem, engine)
    J = linearised(problem, engine)
    assert residual(J).shape == problem.closure().shape
    assert torch.allclose(residual(J).flatten(), problem.residual_at(problem.flat()), rtol=1e-12, atol=1e-12)
    assert J.num_samples == len(problem.args[0])
    assert J.gram().dtype == torch.float64
    assert not residual(J).requires_grad
    assert [d.shape for d in vjp(J, J.trained, residual(J).flatten())] == [
        p.shape for p in problem.trained().params.values()
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Case) -> None:
    problem = case.make()
    J = linearised(problem)
    oracle = LoopEngine().linearise(problem.model, problem.trained(), problem.closure, SQUARED)
    assert relative_error(J.gram()[0], oracle.gram()[0]) < TOLERANCE
    u = torch.randn(residual(J).numel(), dtype=torch.float64)
    for pulled, expected in zip(vjp(J, J.trained, u), vjp(oracle, J.trained, u), strict=True):
        assert torch.allclose(pulled, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_agrees_within_its_rounding(case: Case) -> None:
    problem = case.make()
    expected = problem.dense_jacobian()
    model = copy.deepcopy(problem.model).float()
    args = tuple(arg.float() if arg.is_floating_point() else arg for arg in problem.args)
    J = of_model(model, lambda: problem.residual(model(*args).double()))
    assert relative_error(J.gram()[0], expected @ expected.T) < 1e-4


def watched(path, seen: list):
    def run(*args):
        seen.append(path)
        return path(*args)

    return run


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("path", ["columns", "grouped", "strips", "pointwise"])
@settings(max_examples=20, deadline=None)
@given(
    b=st.integers(1, 6),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    size=st.tuples(st.integers(5, 7), st.integers(5, 8)),
    k=st.integers(1, 2),
)
def test_every_way_of_a_convolution(
    memory_format: torch.memory_format,
    path: str,
    b: int,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    size: tuple[int, int],
    k: int,
) -> None:
    """G05: each path at any shape it covers and in either memory format, whatever the static rule chooses."""
    torch.manual_seed(0)
    if path == "strips":
        stride, dilation = (1, 1), (1, 1)
        kernel, padding = (3, 2 * kernel[1] - 1), (1, kernel[1] - 1)
    elif path == "pointwise":
        kernel, stride, padding, dilation = (1, 1), (1, 1), (0, 0), (1, 1)
    conv = nn.Conv2d(*channels, kernel, stride=stride, padding=padding, dilation=dilation)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(k)).double()
    x = torch.randn(b, channels[0], *size, dtype=torch.float64)
    model(x)
    x = x.contiguous(memory_format=memory_format)
    model.to(memory_format=memory_format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_module, "COLUMNS_BYTES", 0)
        patch.setattr(conv_module, "STRIPS_BYTES", 0)
        seen = []
        patch.setitem(PATHS, path, watched(PATHS[path], seen))
        patch.setattr(conv_module, "LEAST_SAMPLES", 2)
        assert_right(Problem(model, (x,), torch.sin), StreamEngine(conv_path=path))
        assert seen


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2), st.booleans())
def test_linear_layers_of_any_leading_shape(b: int, k: int, middle: list[int], bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4, bias=bias), nn.ReLU(inplace=True), nn.Linear(4, k, bias=bias)
    ).double()
    x = torch.randn(b, *middle, 3, dtype=torch.float64)
    assert_right(Problem(model, (x,), lambda f: f.reshape(b, -1, k).sum(dim=1).sin()))


def test_the_block_of_a_linear_layer_is_not_formed() -> None:
    """The Hadamard Gram matrix: only inputs and output gradients are held."""
    J = linearised(CASES_BY_NAME["mlp_three_outputs"].make())
    assert not J.jacobian.accumulated.held
    assert len(J.jacobian.accumulated.factors) == 2
    twice = linearised(CASES_BY_NAME["used_twice"].make()).jacobian.accumulated
    assert {name for blocks in twice.small for name in blocks.names} == {"layer.weight", "layer.bias"}


def test_autograd_forms_no_weight_gradient() -> None:
    """One backward pass with respect to layer outputs: weights are never asked for."""
    problem, masks = CASES_BY_NAME["resnet_fixup"].make(), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution_backward.default and args[2].shape[0] <= 16:
                masks.append(tuple(args[10]))
            return func(*args, **(kwargs or {}))

    engine = StreamEngine()
    linearised(problem, engine)
    with Watch():
        linearised(problem, engine)
    assert set(masks) == {(True, False, False)}


def test_model_and_closure_are_called_once() -> None:
    problem, calls = CASES_BY_NAME["mlp"].make(), []
    problem.model[0].register_forward_hook(lambda *_: calls.append("layer"))
    problem.model.register_forward_hook(lambda *_: calls.append("model"))

    def closure() -> Tensor:
        calls.append("closure")
        return problem.closure()

    StreamEngine().linearise(problem.model, problem.trained(), closure, SQUARED)
    assert calls == ["closure", "layer", "model"]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(model: nn.Module) -> bool:
    return any(getattr(module, hooks) for module in model.modules() for hooks in HOOKS)


@pytest.mark.parametrize("name", ["convolutions", "resnet_fixup", "linear", "attention"])
def test_nothing_is_left_on_the_model(name: str) -> None:
    """G11: no hook, no replaced forward and no gradient stays, also when the closure raises."""
    problem = CASES_BY_NAME[name].make()
    before = set(vars(problem.model))
    linearised(problem)

    def failing() -> Tensor:
        problem.model(*problem.args)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        StreamEngine().linearise(problem.model, problem.trained(), failing, SQUARED)
    assert set(vars(problem.model)) == before
    assert not has_hooks(problem.model)
    assert all(param.grad is None for param in problem.model.parameters())


@pytest.mark.parametrize("name", ["mlp_three_outputs", "resnet_fixup", "outside_the_layers"])
def test_memory_is_flat_over_many_steps(name: str) -> None:
    """G11: steps, failed steps and evaluations leave no tensor behind; evaluation captures nothing."""
    problem = CASES_BY_NAME[name].make()
    optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=1e3, engine="stream")

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def failing() -> Tensor:
        problem.closure()
        raise KeyError("mine")

    def failing_inside(*_: object) -> None:
        raise KeyError("mine")

    def round_of_steps() -> None:
        optimizer.step(problem.closure)
        with pytest.raises(KeyError):
            optimizer.step(failing)
        last = [module for module in problem.model.modules() if isinstance(module, nn.Linear)][-1]
        handle = last.register_forward_pre_hook(failing_inside)
        with pytest.raises(KeyError):
            optimizer.step(problem.closure)
        handle.remove()
        with torch.no_grad():
            problem.closure()
        assert problem.closure().requires_grad

    round_of_steps()
    before = num_tensors()
    for _ in range(20):
        round_of_steps()
    assert num_tensors() == before


def test_nothing_is_left_behind_after_a_thousand_steps() -> None:
    """G11: neither tensors nor hooks pile up, in steps, in evaluation, or with optimizers that were let go."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.Tanh(), nn.Flatten(), nn.Linear(80, 1)
    )
    x, y = torch.randn(4, 1, 4, 4), torch.randn(4, 1)

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def steps(number: int) -> None:
        optimizer = GramGaussNewton(model, lam=1.0, alpha=10.0)
        for _ in range(number):
            optimizer.step(lambda: model(x) - y)
            with torch.no_grad():
                model(x)

    steps(3)
    before = num_tensors()
    steps(1000)
    for _ in range(50):
        steps(1)
    assert num_tensors() == before
    assert not has_hooks(model)


def test_steps_equal_those_of_the_other_engines() -> None:
    after = []
    for engine in ("vmap", "stream", "loop"):
        problem = CASES_BY_NAME["resnet_fixup"].make()
        optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, engine=engine)
        for _ in range(3):
            optimizer.step(problem.closure)
        after.append(problem.flat())
    assert relative_error(after[0], after[2]) < 1e-8
    assert relative_error(after[1], after[2]) < 1e-8


def test_copies_hold_no_buffers() -> None:
    problem = CASES_BY_NAME["resnet_fixup"].make()
    optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, engine="stream")
    optimizer.step(problem.closure)
    model, copied = copy.deepcopy((problem.model, optimizer))
    again = pickle.loads(pickle.dumps((model, copied)))[1]
    for other in (copied, again):
        assert not other._engine._memories.buffers._flat
        assert not other._engine._memories.buffers._kept
    copied.step(lambda: model(*problem.args))


class Free(nn.Module):
    """A linear layer with a forward of the test's own."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x)


def read_past_its_module(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) + functional.linear(x, layer.weight)


def change_the_input(layer: nn.Linear, x: Tensor) -> Tensor:
    x = x.clone()
    y = layer(x)
    x.add_(1)
    return y


def turned(layer: nn.Linear, x: Tensor) -> Tensor:
    """Another dimension than the samples' in front, of another size."""
    return layer(x.view(len(x), 2, 4).transpose(0, 1)).transpose(0, 1).sum(dim=1)


REFUSED = {
    "read_past_its_module": (read_past_its_module, "parameter 'layer.weight' is used"),
    "change_the_input": (change_the_input, "was changed in place"),
    "mixes": (lambda layer, x: torch.tanh(layer(x - x.mean(dim=0)) - layer(x).mean(dim=0)), "mixes samples"),
    "turned": (turned, "leading dimension of every layer"),
    "no_grad": (lambda layer, x: layer(x).detach(), "does not depend on a parameter"),
    "checkpoint": (
        lambda layer, x: checkpoint(layer, x.requires_grad_(), use_reentrant=True),
        "use_reentrant=False",
    ),
}


@pytest.mark.parametrize(("forward", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_would_be_wrong_is_refused(forward, message: str) -> None:
    model = Free(forward).double()
    x = torch.randn(6, 8 if forward is turned else 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        of_model(model, lambda: model(x))
    assert not has_hooks(model)


def test_as_many_places_as_samples_are_not_taken_for_samples() -> None:
    model = Free(turned).double()
    x = torch.randn(2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="mixes samples"):
        of_model(model, lambda: model(x))


class Noisy(nn.Module):
    """A module without a rule that draws random numbers."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.weight = p, nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p) @ self.weight


def test_random_numbers_in_a_module_without_a_rule_are_refused() -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4), Noisy(0.0)).double()
    assert_right(Problem(model, (x,), torch.sin))
    model[1].p = 0.5
    with pytest.raises(ValueError, match="draws random numbers"):
        linearised(Problem(model, (x,), torch.sin))


def test_checkpointing_that_keeps_the_graph_is_right() -> None:
    model = Free(lambda layer, x: checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=False)).double()
    assert_right(Problem(model, (torch.randn(6, 4, dtype=torch.float64),), torch.sin))


def test_residual_and_jacobian_share_the_dropout_mask() -> None:
    """G16: f = J w holds for a linear model with the same mask only."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False)).double()
    x = torch.ones(4, 64, dtype=torch.float64)
    J = of_model(model, lambda: model(x))
    assert torch.allclose(dense(J) @ model[1].weight[0], residual(J)[:, 0], rtol=1e-12, atol=1e-12)


def test_a_zero_last_layer() -> None:
    """The published start, where all deeper gradients vanish; the check for mixing comes back to them."""
    problem = CASES_BY_NAME["resnet_fixup"].make()
    with torch.no_grad():
        problem.model.last.weight.zero_()
    engine = StreamEngine()
    for _ in range(3):
        assert_right(problem, engine)


def test_unbatched_layers_are_refused() -> None:
    model = Free(lambda layer, x: layer(x)).double()
    for inner in (nn.Conv2d(1, 1, 3), nn.InstanceNorm1d(1, affine=True)):
        model.layer = inner.double()
        model.run = lambda layer, x: layer(
            x.squeeze(1) if isinstance(layer, nn.Conv2d) else x[:, 0, 0]
        ).sum()[None]
        x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
        with pytest.raises(ValueError, match="without a dimension for samples"):
            of_model(model, lambda x=x: model(x))


def test_masks_that_are_no_numbers_may_multiply_a_parameter() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return ((x > 0) * self.scale * x).sum(dim=1)

    assert_right(Problem(Gate().double(), (torch.randn(5, 3, dtype=torch.float64),), torch.sin))


@pytest.mark.parametrize("name", ["mlp_three_outputs", "used_twice", "resnet_fixup"])
def test_bfloat16_blocks_are_multiplied_in_float32(name: str) -> None:
    problem = CASES_BY_NAME[name].make()
    model = copy.deepcopy(problem.model).bfloat16()
    args = tuple(arg.bfloat16() for arg in problem.args)
    J = of_model(model, lambda: model(*args).float())
    rows = torch.stack(
        [
            torch.cat([d.flatten() for d in vjp(J, J.trained, row)]).double()
            for row in torch.eye(residual(J).numel(), dtype=torch.float64)
        ]
    )
    assert relative_error(J.gram()[0], rows @ rows.T) < 0.02
    assert all(d.dtype == torch.bfloat16 for d in vjp(J, J.trained, residual(J).flatten()))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


class Of(nn.Module):
    """A module with a forward of the test's own."""

    def __init__(self, forward, **parts) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def and_what_it_was_computed_from(module, x):
    h = x @ module.w
    return h.tanh() @ module.v, h


def kept_aside(module, x):
    module.h = x @ module.w
    return module.h.tanh() @ module.v


def derivative_of_its_input(model, x):
    x = x.detach().requires_grad_()
    u = model.net(x)
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0][:, 0] + u[:, 0]


def later_residuals_mixed(model, x):
    h = model.a(x)
    return torch.stack([h[:, 0], h[:, 1] - h[:, 1].mean()], dim=1)


def at_first_only(module, x):
    if not hasattr(module, "called"):
        module.called = True
        return x @ module.w
    return 2 * x @ module.w


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


UNSEEN = {
    "an intermediate result beside the output": lambda: Of(
        lambda m, x: m.q(x)[0].sum(1),
        q=Of(and_what_it_was_computed_from, w=parameter(5, 3), v=parameter(3, 2)),
    ),
    "an intermediate result kept aside": lambda: Of(
        lambda m, x: m.q(x).sum(1) + m.q.h.sin().sum(1),
        q=Of(kept_aside, w=parameter(5, 3), v=parameter(3, 2)),
    ),
    "a derivative inside of the forward": lambda: Of(derivative_of_its_input, net=small_net()),
    "a shared tensor as long as the batch": lambda: Of(
        lambda m, x: m.i(x[:, :4, None].expand(4, 4, 3), torch.arange(12.0).view(4, 3)).tanh().sum((1, 2)),
        i=Of(lambda m, x, p: (x + p.to(x)) @ m.w, w=parameter(3, 3)),
    ),
    "samples mixed in the first layer": lambda: Of(
        lambda m, x: m.q(x).tanh().sum(1), q=Of(lambda m, x: (x - x.mean(0)) @ m.w, w=parameter(5, 3))
    ),
    "samples mixed in a later residual": lambda: Of(later_residuals_mixed, a=nn.Linear(5, 2)),
    "a state that changes from call to call": lambda: Of(
        lambda m, x: m.q(x).tanh().sum(1), q=Of(at_first_only, w=parameter(5, 3))
    ),
}


@pytest.mark.parametrize("options", [{}, {"low_memory": True}], ids=str)
@pytest.mark.parametrize("build", UNSEEN.values(), ids=list(UNSEEN))
def test_what_the_engine_cannot_follow_is_found_out(build, options: dict) -> None:
    """G21: a wrong Jacobian is never silent: it is compared with autograd while a network is new."""
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(4, 5, dtype=torch.float64)
    k = model(x).numel() // 4
    if hasattr(getattr(model, "q", None), "called"):
        del model.q.called
    if options and k > 1:
        pytest.skip("low_memory has one residual for each sample")
    with pytest.raises(ValueError, match="is not autograd's"):
        of_model(model, lambda: model(x), StreamEngine(**options))
    assert not has_hooks(model)


def test_mixing_that_is_switched_on_later_is_found_out() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: (m.a(x) - (m.a(x).mean(0) if m.training else 0)).tanh().sum(1), a=nn.Linear(5, 3))
    model.double().eval()
    x, engine = torch.randn(4, 5, dtype=torch.float64), StreamEngine()
    of_model(model, lambda: model(x), engine)
    model.train()
    with pytest.raises(ValueError, match="is not autograd's"):
        of_model(model, lambda: model(x), engine)


def test_a_mixture_behind_a_zero_layer_is_found_out_later() -> None:
    """The derivatives are zero at first, for longer than any fixed number of looks."""
    torch.manual_seed(0)
    model = Of(
        lambda m, x: m.last((m.a(x) - m.a(x).mean(0)).tanh()), a=nn.Linear(5, 3), last=nn.Linear(3, 1)
    ).double()
    nn.init.zeros_(model.last.weight)
    x, engine = torch.randn(4, 5, dtype=torch.float64), StreamEngine()
    for _ in range(20):
        of_model(model, lambda: model(x), engine)
    nn.init.ones_(model.last.weight)

    def more() -> None:
        for _ in range(20):
            of_model(model, lambda: model(x), engine)

    with pytest.raises(ValueError, match="is not autograd's"):
        more()


def test_the_fall_back_leaves_the_users_hooks_and_buffers_alone() -> None:
    torch.manual_seed(0)
    inner = Of(lambda m, x: x @ m.w, w=parameter(5, 3))
    inner.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    model = Of(lambda m, x: m.normed(m.inner(x).tanh()).sum(1), inner=inner, normed=normed).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    of_model(model, lambda: model(x))
    other = copy.deepcopy(model)
    of_model(model, lambda: model(x))
    other(x)
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("places", [3, 4, 5])
def test_attention_over_as_many_places_as_samples(places: int) -> None:
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    x = torch.randn(4, places, 6, dtype=torch.float64)
    assert_right(Problem(model, (x,), lambda f: f.sum(dim=(1, 2)).sin()))


@pytest.mark.parametrize("strided_first", [True, False])
def test_a_kernel_tied_between_two_kinds_of_convolution(strided_first: bool) -> None:
    """Their blocks come in different layouts and numbers of parts."""
    torch.manual_seed(0)
    strided, plain = nn.Conv2d(8, 6, 3, padding=1, stride=2), nn.Conv2d(8, 6, 3, padding=1)
    plain.weight = strided.weight
    first, second = (strided, plain) if strided_first else (plain, strided)
    model = Of(
        lambda m, x: m.first(x).tanh().mean((1, 2, 3)) + m.second(x).sin().mean((1, 2, 3)),
        first=first,
        second=second,
    ).double()
    x = torch.randn(4, 8, 6, 6, dtype=torch.float64)
    assert_right(Problem(model, (x,), torch.sin))


def test_mixed_dtypes_are_not_taken_for_a_mixture() -> None:
    torch.manual_seed(0)
    for first, last in ((torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
        a, b = nn.Linear(5, 6).to(first), nn.Linear(6, 1).to(last)
        model = Of(lambda m, x, last=last: m.b(m.a(x).tanh().to(last)).double(), a=a, b=b)
        x = torch.randn(6, 5, dtype=first)
        of_model(model, lambda model=model, x=x: model(x))


def test_decoupled_decay_with_low_memory_is_one_step() -> None:
    """G04: nothing is changed before the whole step is there."""
    torch.manual_seed(0)
    model, steps = small_net().double(), []
    x = torch.randn(8, 5, dtype=torch.float64)
    for low_memory in (False, True):
        own = copy.deepcopy(model)
        optimizer = GramGaussNewton(
            own,
            lam=1.0,
            alpha=0.1,
            weight_decay=0.1,
            decoupled_weight_decay=True,
            engine=Stream(low_memory=low_memory),
        )
        optimizer.step(lambda own=own: own(x))
        steps.append(torch.nn.utils.parameters_to_vector(own.parameters()))
    assert torch.allclose(*steps, rtol=1e-10, atol=1e-12)
