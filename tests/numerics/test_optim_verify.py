"""A wrong Jacobian is never silent: every engine is compared with autograd, and the comparison changes nothing."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import Problem
from test_optim_engines import assert_right
from test_optim_stream import Of, parameter
from torch import Tensor, nn
from torch.nn import functional

from gramgn import GramGaussNewton
from gramgn.optim import Loop, Stream, Vmap

# Some networks contain modules without a rule on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning")

ENGINES = {
    "stream": Stream(),
    "chunks": Stream(chunk_size=2),
    "vmap": Vmap(),
    "vmap_chunks": Vmap(chunk_size=2),
}
SPLITTING = {name: ENGINES[name] for name in ("chunks", "vmap", "vmap_chunks")}
MIXES = "is not autograd's|other outputs within a batch|within a batch than"


def steps(model: nn.Module, options: Stream | Vmap | Loop, *args: Tensor) -> Iterator[GramGaussNewton]:
    """Take one step after the other on the same batch."""
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine=options)
    y = torch.linspace(-1, 1, len(args[0])).to(args[0]) if args[0].is_floating_point() else 0.5
    while True:
        optimizer.step(lambda: model(*args).flatten() - y)
        yield optimizer


def take(number: int, model: nn.Module, options: Stream | Vmap | Loop, *args: Tensor) -> None:
    """Take a number of steps."""
    torch.manual_seed(1)
    walk = steps(model, options, *args)
    for _ in range(number):
        next(walk)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def mixed(h: Tensor) -> Tensor:
    return h - h.mean(dim=0)


def two_layers(between: Callable[[Tensor], Tensor], zero: bool = False) -> nn.Module:
    """Two linear layers of 5, 4 and 1 features, the last one 0 on request."""
    model = Of(lambda m, x: m.b(between(m.a(x)).tanh()), a=nn.Linear(5, 4), b=nn.Linear(4, 1)).double()
    if zero:
        nn.init.zeros_(model.b.weight)
    return model


def attention_like(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Places [b, T, features] weighted by a matrix [T, T] that all samples share."""
    return functional.dropout(mask @ model.a(x), 0.2).tanh().sum(dim=(1, 2))


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: functional.dropout(h, 0.5),
    "feature dropout": lambda h: functional.dropout1d(h[:, :, None], 0.4)[:, :, 0],
    "alpha dropout": lambda h: functional.alpha_dropout(h, 0.3, training=True),
    "uniform mask": lambda h: h * (torch.rand_like(h) < 0.5),
    "new mask": lambda h: h * (torch.rand(h.shape) < 0.7),
    "noise": lambda h: h + 0.1 * torch.randn_like(h),
    "noise in place": lambda h: h + torch.empty_like(h).uniform_(-1, 1),
    "stochastic depth": lambda h: h + (torch.rand(len(h), 1) < 0.5) * h.tanh(),
    "bernoulli of itself": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "permuted features": lambda h: h[:, torch.randperm(4)] if len(h) > 1 else h.flip(1),
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("between", [f for n, f in DROPOUTS.items() if n != "permuted features"])
def test_networks_that_draw_random_numbers_are_taken(between, options: Stream | Vmap) -> None:
    take(3, two_layers(between), options, torch.randn(6, 5, dtype=torch.float64))


@pytest.mark.parametrize("options", SPLITTING.values(), ids=list(SPLITTING))
@pytest.mark.parametrize("between", DROPOUTS.values(), ids=list(DROPOUTS))
def test_mixing_among_random_numbers_is_rejected(between, options: Stream | Vmap) -> None:
    """Two passes that differ by their masks are compared all the same."""
    model, x = two_layers(lambda h: mixed(between(h))), torch.randn(6, 5, dtype=torch.float64)
    before = flat(model)
    with pytest.raises(ValueError, match=MIXES):
        take(1, model, options, x)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("options", SPLITTING.values(), ids=list(SPLITTING))
def test_a_shared_mask_as_long_as_the_batch_is_rejected_also_in_the_last_batch(
    options: Stream | Vmap,
) -> None:
    model = Of(attention_like, a=nn.Linear(3, 2)).double()
    x, mask = torch.randn(6, 4, 3, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine=options)
    optimizer.step(lambda: model(x, mask) - 1.0)
    before = flat(model)
    with pytest.raises(ValueError, match="as many entries as the batch"):
        optimizer.step(lambda: model(x[:4], mask) - 1.0)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("wakes", [2, 3, 6, 21])
def test_what_is_wrong_behind_a_zero_is_rejected_in_the_step_in_which_it_wakes(options, wakes: int) -> None:
    """The block of the first layer is 0 until the gate opens."""
    torch.manual_seed(0)
    model = Of(
        lambda m, x: m.b(x) + m.gate * (m.a(x) + m.a(x).mean(dim=0)).tanh().sum(dim=1, keepdim=True),
        a=nn.Linear(5, 4),
        b=nn.Linear(5, 1),
        gate=torch.zeros(()),
    ).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    walk = steps(model, options, x)
    for _ in range(wakes - 1):
        next(walk)
    model.gate = torch.tensor(1e-2, dtype=torch.float64)
    before = flat(model)
    with pytest.raises(ValueError, match=MIXES):
        next(walk)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
def test_mixing_behind_a_last_layer_of_zeros_is_rejected_before_it_counts(options: Stream | Vmap) -> None:
    model, x = two_layers(mixed, zero=True), torch.randn(6, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=MIXES):
        take(2, model, options, x)


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
def test_interaction_that_an_attribute_switches_on_is_noticed_at_last(options: Stream | Vmap) -> None:
    model = Of(lambda m, x: m.a(x) - m.mix * m.a(x).mean(dim=0), a=nn.Linear(2, 1), mix=0.0).double()
    walk = steps(model, options, torch.randn(4, 2, dtype=torch.float64))
    for _ in range(10):
        next(walk)
    model.mix = 0.3

    def more() -> None:
        for _ in range(100):
            next(walk)

    with pytest.raises(ValueError, match=MIXES):
        more()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every comparison."""
    numbers: list[int] = []
    kind = sys.modules["gramgn.optim.verify"].Comparison
    own = kind.compare

    def compare(self, *args: object) -> set[str]:
        numbers.append(1)
        return own(self, *args)

    monkeypatch.setattr(kind, "compare", compare)
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [Stream(), Vmap()], ids=["stream", "vmap"])
def test_derivatives_that_are_always_zero_cost_no_comparison_per_step(
    options: Stream | Vmap, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias in front of a normalisation, whose block is rounding, and a parameter that nothing reads."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(12, 1)
    )
    model[4].idle = nn.Parameter(torch.ones(3))
    numbers = counted(monkeypatch)
    take(60, model.to(dtype), options, torch.randn(6, 5, dtype=dtype))
    assert 4 <= len(numbers) <= 10


@pytest.mark.parametrize("options", [*ENGINES.values(), Loop()], ids=[*ENGINES, "loop"])
def test_a_comparison_changes_no_bit(options: Stream | Vmap | Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the step, nor random numbers, buffers or attributes, which a forward may change."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.calls += 1
        if not isinstance(options, Vmap):  # which rejects it
            m.counter += 1
        return m.b(functional.dropout(m.a(x), 0.5).tanh())

    torch.manual_seed(0)
    model = Of(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 1), calls=0).double()
    model.register_buffer("counter", torch.zeros((), dtype=torch.int64))
    x = torch.randn(6, 5, dtype=torch.float64)
    ends = []
    for compared in (True, False):
        own = copy.deepcopy(model)
        if not compared:
            monkeypatch.setattr("gramgn.optim.verify.Verifier.begin", lambda *_: None)
        take(3, own, options, x)
        ends.append((flat(own), own.calls, own.counter, torch.rand(3)))
    for with_, without in zip(*ends, strict=True):
        assert with_ == without if isinstance(with_, int) else torch.equal(with_, without)
    assert isinstance(options, Vmap) or ends[0][1] == ends[0][2]


@pytest.mark.parametrize("options", [*ENGINES.values(), Loop()], ids=[*ENGINES, "loop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_half_precision_are_rejected(dtype: torch.dtype, options: Stream | Vmap | Loop) -> None:
    model = nn.Linear(5, 1).to(dtype)
    with pytest.raises(ValueError, match=r"float32.*jacobian_dtype='bfloat16'"):
        GramGaussNewton(model, lam=1.0, alpha=0.1, engine=options)
    model = nn.Linear(5, 1)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine=options)
    model.to(dtype)
    with pytest.raises(ValueError, match="float32"):
        optimizer.step(lambda: model(torch.randn(4, 5, dtype=dtype)).float())


def autocast(h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (h @ torch.eye(4)).float()


@pytest.mark.parametrize("options", [*ENGINES.values(), Loop()], ids=[*ENGINES, "loop"])
@pytest.mark.parametrize(
    "between", [lambda h: h.bfloat16().tanh().float(), lambda h: h.half().float(), autocast]
)
def test_half_precision_inside_a_forward_is_rejected(between, options: Stream | Vmap | Loop) -> None:
    with pytest.raises(ValueError, match=r"computes in torch\.b?float16 inside its forward"):
        take(1, two_layers(between).float(), options, torch.randn(6, 5))


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("share", [0.3, 0.01])
def test_mixing_is_not_taken_for_the_rounding_of_a_shorter_format(
    share: float, chunk_size: int | None
) -> None:
    model = two_layers(lambda h: h - share * h.mean(dim=0)).float()
    with pytest.raises(ValueError, match=MIXES):
        take(1, model, Stream(jacobian_dtype="bfloat16", chunk_size=chunk_size), torch.randn(6, 5))
    take(9, two_layers(lambda h: h).float(), Stream(jacobian_dtype="bfloat16"), torch.randn(6, 5))


def embedded(**options) -> nn.Module:
    model = Of(
        lambda m, x: m.b(functional.dropout(m.e(x).tanh().sum(dim=1), m.p)),
        e=nn.Embedding(7, 3, **options),
        b=nn.Linear(3, 1),
        p=0.0,
    )
    return model.double()


def functionally_scaled(m: nn.Module, x: Tensor) -> Tensor:
    return functional.embedding(x, m.w, scale_grad_by_freq=True).tanh().sum(dim=(1, 2))


@pytest.mark.parametrize("options", [*ENGINES.values(), Loop()], ids=[*ENGINES, "loop"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_that_are_no_derivatives_are_rejected(options: Stream | Vmap | Loop, p: float) -> None:
    tokens = torch.tensor([[1, 2, 1], [1, 1, 3], [0, 1, 2], [1, 4, 4]])
    model = embedded(scale_grad_by_freq=True)
    model.p = p
    for network in (model, Of(functionally_scaled, w=parameter(7, 3))):
        with pytest.raises(ValueError, match="scale_grad_by_freq=False"):
            take(1, network, options, tokens)


@pytest.mark.parametrize(
    "options", [Stream(), Stream(chunk_size=2), Stream(memory_budget="least"), Vmap(), Loop()], ids=str
)
@pytest.mark.parametrize("kind", [{"sparse": True}, {"max_norm": 0.5}], ids=str)
def test_tables_with_sparse_gradients_or_bounded_norms(options: Stream | Vmap | Loop, kind: dict) -> None:
    tokens = torch.tensor([[1, 2, 1], [1, 1, 3], [0, 1, 2], [1, 4, 4]])
    torch.manual_seed(0)
    model = embedded(**kind)
    problem = Problem(model, (tokens,), torch.sin)
    if isinstance(options, Vmap):
        with pytest.raises(ValueError, match="engine='stream'"):
            take(1, model, options, tokens)
        return
    model(tokens)
    plain = embedded()
    plain.load_state_dict(model.state_dict())
    assert_right(problem, options.build(), Problem(plain, (tokens,), torch.sin).dense_jacobian())
    take(3, model, options, tokens)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted": lambda h: h.sort(dim=0)[0],
    "turned": lambda h: h + 0.3 * h.roll(1, 0),
    "softmax": lambda h: h.softmax(0),
    "largest": lambda h: h / h.abs().max(),
    "pairs": lambda h: (h @ h.T) @ h,
    "sums": lambda h: h.cumsum(0),
    "spectrum": lambda h: torch.fft.fft(h, dim=0).real,
    "statistics": lambda h: (h - h.mean(0)) / (h.var(0, correction=0) + 0.1).sqrt(),
    "shuffled": lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "weighted at random": lambda h: h + torch.rand(()) * h.flip(0),
    "twice": lambda h: h.repeat(2, 1).tanh()[: len(h)] + h.mean(),
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("between", MIXING.values(), ids=list(MIXING))
def test_interaction_of_samples_is_rejected_in_the_first_step(between, options: Stream | Vmap) -> None:
    model, x = two_layers(between), torch.randn(6, 5, dtype=torch.float64)
    before = flat(model)
    with pytest.raises(ValueError, match=MIXES):
        take(1, model, options, x)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("options", [Stream(), Vmap()], ids=["stream", "vmap"])
def test_a_network_that_counts_its_calls_is_taken(options: Stream | Vmap) -> None:
    """A comparison runs each pass from the same state."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.calls += 1
        return m.calls * m.b(m.a(x).tanh())

    model = Of(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 1), calls=0).double()
    take(3, model, options, torch.randn(6, 5, dtype=torch.float64))
    assert model.calls == 3


@pytest.mark.parametrize("options", [Vmap(), Stream(chunk_size=1)], ids=str)
def test_what_is_not_finite_for_one_sample_alone_is_rejected(options: Stream | Vmap) -> None:
    """It looks like a step that is not finite, and is none."""
    model = two_layers(lambda h: h / mixed(h.detach()).norm())
    with pytest.raises(ValueError, match=MIXES):
        take(1, model, options, torch.randn(6, 5, dtype=torch.float64))


def test_an_operation_more_is_compared_at_once() -> None:
    """The graph of the network changes, although the same modules are called with the same shapes."""
    model = Of(
        lambda m, x: m.b((mixed(m.a(x)) if m.on else m.a(x)).tanh()),
        a=nn.Linear(5, 4),
        b=nn.Linear(4, 1),
        on=0,
    )
    walk = steps(model.double(), Stream(), torch.randn(6, 5, dtype=torch.float64))
    for _ in range(20):
        next(walk)
    model.on = 1
    with pytest.raises(ValueError, match=MIXES):
        next(walk)


@pytest.mark.parametrize("engine", ["stream", "vmap", "loop"])
def test_hooks_registered_for_all_modules_are_followed(engine: str) -> None:
    """A hook that changes outputs is part of the network, once per module."""
    model, x = two_layers(lambda h: h), torch.randn(6, 5, dtype=torch.float64)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: 1.5 * output if isinstance(module, nn.Linear | Of) else None
    )
    try:
        y = model(x).detach() - 1
        outputs = model(x)
        J = torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(f, list(model.parameters()), retain_graph=True)]
                )
                for f in outputs.flatten()
            ]
        )
        before = flat(model)
        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, damping_convention="sum", engine=engine)
        optimizer.step(lambda: model(x) - y)
    finally:
        handle.remove()
    u = torch.linalg.solve(
        J @ J.T + 0.1 * torch.eye(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    )
    assert torch.allclose(flat(model) - before, -J.T @ u, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["stream", "vmap"])
def test_a_hook_that_mixes_samples_is_reported_in_the_step_after_its_registration(engine: str) -> None:
    """G11: in steps in which no comparison is due otherwise."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine=engine)
    x = torch.randn(6, 5, dtype=torch.float64)
    for _ in range(2):
        optimizer.step(lambda: model(x) - 1)
    model[1].register_forward_hook(lambda _, __, h: h + h.mean(dim=0, keepdim=True))
    with pytest.raises(ValueError, match=MIXES):
        optimizer.step(lambda: model(x) - 1)


def test_a_parameter_with_an_entry_for_each_sample_is_not_called_a_mixture() -> None:
    model = Of(
        lambda m, x: m.b((m.a(x) + m.p).tanh()), a=nn.Linear(5, 4), b=nn.Linear(4, 1), p=parameter(6, 4)
    )
    x = torch.randn(6, 5, dtype=torch.float64)
    assert_right(Problem(model.double(), (x,), torch.sin), Stream().build())
    with pytest.raises(ValueError, match="for a batch of one sample"):
        take(1, model, Vmap(), x)
