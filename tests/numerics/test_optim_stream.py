"""The streaming engine rejects, or finds out, uses of a network for which its Jacobian would be wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import CASES_BY_NAME, Problem, has_hooks, relative_error
from test_optim_engines import assert_right, dense, linearised
from test_optim_engines import of_model as of_model_with
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gramgn import GramGaussNewton
from gramgn.optim import Engine, Linearisation, Stream, Vmap
from gramgn.optim.stream import StreamEngine

# Some networks of the table contain modules without a rule on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")


def of_model(model: nn.Module, closure, engine: Engine | None = None) -> Linearisation:
    return of_model_with(model, closure, engine or Stream().build())


def test_autograd_forms_no_weight_gradient() -> None:
    """One backward pass with respect to layer outputs: gradients of weights are never requested."""
    problem, masks = CASES_BY_NAME["resnet_fixup"].make(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution_backward.default and args[2].shape[0] <= 16:
                masks.append(tuple(args[10]))
            return func(*args, **(kwargs or {}))

    engine = StreamEngine(backend="blas")  # whose paths do not call the library's weight gradient themselves
    trained = problem.trained()
    for _ in range(2):
        linearised(problem, engine, trained)  # compared with autograd, which forms them
    with Watch():
        linearised(problem, engine, trained)
    assert set(masks) == {(True, False, False)}


class Free(nn.Module):
    """A linear layer in a module with a test-defined forward."""

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
    """A leading dimension that is not the samples', of another size."""
    return layer(x.view(len(x), 2, 4).transpose(0, 1)).transpose(0, 1).sum(dim=1)


REJECTED = {
    "change_the_input": (change_the_input, "was changed in place"),
    "mixes": (lambda layer, x: torch.tanh(layer(x - x.mean(dim=0)) - layer(x).mean(dim=0)), "mixes samples"),
    "no_grad": (lambda layer, x: layer(x).detach(), "or in the model.s forward"),
    "checkpoint": (
        lambda layer, x: checkpoint(layer, x.requires_grad_(), use_reentrant=True),
        "use_reentrant=False",
    ),
}


@pytest.mark.parametrize(("forward", "message"), REJECTED.values(), ids=list(REJECTED))
def test_what_would_be_wrong_is_rejected(forward, message: str) -> None:
    model = Free(forward).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        of_model(model, lambda: model(x))
    assert not has_hooks(model)


@pytest.mark.parametrize("b", [2, 6])
def test_as_many_places_as_samples_are_not_taken_for_samples(b: int) -> None:
    model = Free(turned).double()
    x = torch.randn(b, 8, dtype=torch.float64)
    assert_right(Problem(model, (x,), torch.sin), Stream().build())


def test_a_weight_may_be_read_past_its_module() -> None:
    model = Free(read_past_its_module).double()
    assert_right(Problem(model, (torch.randn(6, 4, dtype=torch.float64),), torch.sin), Stream().build())


class Noisy(nn.Module):
    """A module without a rule that draws random numbers."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.weight = p, nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p) @ self.weight


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_module_without_a_rule_may_draw_random_numbers(p: float) -> None:
    problem = Problem(
        nn.Sequential(nn.Linear(4, 4), Noisy(p)).double(),
        (torch.randn(5, 4, dtype=torch.float64),),
        torch.sin,
    )
    torch.manual_seed(1)
    expected = problem.dense_jacobian()
    torch.manual_seed(1)
    trained = problem.trained()
    torch.manual_seed(1)
    assert relative_error(dense(linearised(problem, Stream().build(), trained), trained), expected) < 1e-10


def test_checkpointing_that_keeps_the_graph_is_right() -> None:
    model = Free(lambda layer, x: checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=False)).double()
    assert_right(Problem(model, (torch.randn(6, 4, dtype=torch.float64),), torch.sin), Stream().build())


def test_a_zero_last_layer() -> None:
    """The published initialisation, for which all deeper gradients vanish; they are verified later."""
    problem = CASES_BY_NAME["resnet_fixup"].make()
    with torch.no_grad():
        problem.model.last.weight.zero_()
    engine = Stream().build()
    for _ in range(3):
        assert_right(problem, engine)


def test_unbatched_layers_are_rejected() -> None:
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

    problem = Problem(Gate().double(), (torch.randn(5, 3, dtype=torch.float64),), torch.sin)
    assert_right(problem, Stream().build())


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


class Of(nn.Module):
    """A module with a test-defined forward."""

    def __init__(self, forward, **parts) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def output_and_intermediate_result(module, x):
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


FOLLOWED = {
    "an intermediate result kept aside": lambda: Of(
        lambda m, x: m.q(x).sum(1) + m.q.h.sin().sum(1),
        q=Of(kept_aside, w=parameter(5, 3), v=parameter(3, 2)),
    ),
    "a shared tensor as long as the batch": lambda: Of(
        lambda m, x: m.i(x[:, :4, None].expand(4, 4, 3), torch.arange(12.0).view(4, 3)).tanh().sum((1, 2)),
        i=Of(lambda m, x, p: (x + p.to(x)) @ m.w, w=parameter(3, 3)),
    ),
    "a state that changes from call to call": lambda: Of(
        lambda m, x: m.q(x).tanh().sum(1), q=Of(at_first_only, w=parameter(5, 3))
    ),
    "a derivative inside the forward": lambda: Of(derivative_of_its_input, net=small_net()),
}
"""What a module that is called again, sample by sample, would show wrongly."""

UNSEEN = {
    "samples mixed in the first layer": lambda: Of(
        lambda m, x: m.q(x).tanh().sum(1), q=Of(lambda m, x: (x - x.mean(0)) @ m.w, w=parameter(5, 3))
    ),
    "samples mixed in a later residual": lambda: Of(later_residuals_mixed, a=nn.Linear(5, 2)),
}


@pytest.mark.parametrize("build", FOLLOWED.values(), ids=list(FOLLOWED))
def test_what_happens_inside_a_module_without_a_rule_is_followed(build) -> None:
    torch.manual_seed(0)
    problem = Problem(build().double(), (torch.randn(4, 5, dtype=torch.float64),), torch.sin)
    problem.closure()
    assert_right(problem, StreamEngine())


@pytest.mark.filterwarnings("ignore:GramGaussNewton. J takes:RuntimeWarning")
@pytest.mark.parametrize("budget", [None, "least"])
@pytest.mark.parametrize("build", UNSEEN.values(), ids=list(UNSEEN))
def test_what_the_engine_cannot_follow_is_detected(build, budget: str | None) -> None:
    """G21: a wrong Jacobian is never silent, because it is compared with autograd while a network is new."""
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(4, 5, dtype=torch.float64)
    engine = StreamEngine(memory_budget=budget)
    with pytest.raises(ValueError, match=r"is not autograd's|mixes samples"):
        of_model(model, lambda: model(x), engine)
    assert not has_hooks(model)


def test_an_intermediate_result_next_to_the_output() -> None:
    """The gradient of one result does not count once more what reaches it by way of the other."""
    torch.manual_seed(0)
    inner = Of(output_and_intermediate_result, w=parameter(5, 3), v=parameter(3, 2))
    x = torch.randn(4, 5, dtype=torch.float64)
    for read in (lambda m, x: m.q(x)[0].sum(1), lambda m, x: m.q(x)[0].sum(1) + m.q(x)[1].sin().sum(1)):
        assert_right(Problem(Of(read, q=inner), (x,), torch.sin), StreamEngine())


def test_mixing_that_is_switched_on_later_is_detected() -> None:
    torch.manual_seed(0)
    model = Of(lambda m, x: (m.a(x) - (m.a(x).mean(0) if m.training else 0)).tanh().sum(1), a=nn.Linear(5, 3))
    model.double().eval()
    x, engine = torch.randn(4, 5, dtype=torch.float64), Stream().build()
    of_model(model, lambda: model(x), engine)
    model.train()
    with pytest.raises(ValueError, match="mixes samples"):
        of_model(model, lambda: model(x), engine)


def test_a_mixture_behind_a_zero_layer_is_detected() -> None:
    torch.manual_seed(0)
    model = Of(
        lambda m, x: m.last((m.a(x) - m.a(x).mean(0)).tanh()), a=nn.Linear(5, 3), last=nn.Linear(3, 1)
    ).double()
    nn.init.zeros_(model.last.weight)
    x = torch.randn(4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="mixes samples"):
        of_model(model, lambda: model(x))


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


@pytest.mark.parametrize("places", [3, 4, 5])
def test_attention_over_as_many_places_as_samples(places: int) -> None:
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    x = torch.randn(4, places, 6, dtype=torch.float64)
    assert_right(Problem(model, (x,), lambda f: f.sum(dim=(1, 2)).sin()), Stream().build())


@pytest.mark.parametrize("strided_first", [True, False])
def test_a_kernel_tied_between_two_kinds_of_convolution(strided_first: bool) -> None:
    """Their blocks have different layouts and different numbers of parts."""
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
    assert_right(Problem(model, (x,), torch.sin), Stream().build())


@pytest.mark.filterwarnings("ignore:GramGaussNewton. J takes:RuntimeWarning")
@pytest.mark.parametrize(
    "options", [Stream(), Stream(chunk_size=2), Stream(memory_budget="least", chunk_size=2), Vmap()], ids=str
)
def test_a_part_in_float32_is_not_taken_for_a_mixture(options: Stream | Vmap) -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(5, 6).double(), nn.Linear(6, 1)
    model = Of(lambda m, x: m.b(m.a(x).tanh().float()).double(), a=a, b=b)
    x = torch.randn(6, 5, dtype=torch.float64)
    of_model(model, lambda: model(x), options.build())
    model = Of(lambda m, x: (m.a(x).float() * 1.5).double(), a=a)
    of_model(model, lambda: model(x), options.build())


def test_decoupled_decay_without_holding_the_jacobian_is_one_step() -> None:
    """G04: nothing is changed before the whole step is known."""
    torch.manual_seed(0)
    model, steps = small_net().double(), []
    x = torch.randn(8, 5, dtype=torch.float64)
    for budget in (None, "least"):
        own = copy.deepcopy(model)
        optimizer = GramGaussNewton(
            own,
            lam=1.0,
            alpha=0.1,
            weight_decay=0.1,
            decoupled_weight_decay=True,
            engine=Stream(memory_budget=budget),
        )
        optimizer.step(lambda own=own: own(x))
        steps.append(torch.nn.utils.parameters_to_vector(own.parameters()))
    assert torch.allclose(*steps, rtol=1e-10, atol=1e-12)
