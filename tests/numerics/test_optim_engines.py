"""Every engine forms the Jacobian of autograd on the whole batch, which knows nothing of samples."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from cases import (
    CASES,
    CASES_BY_NAME,
    VMAP_CASES,
    Case,
    Problem,
    all_trained,
    flattened,
    has_hooks,
    leaves_no_tensor_behind,
    relative_error,
    vjp,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.optim import (
    CrossEntropy,
    Engine,
    Linearisation,
    Loop,
    Loss,
    Rows,
    SquaredError,
    Stream,
    Trained,
    Vmap,
)

TOLERANCE = 1e-10
SQUARED = SquaredError()

# Some networks of the table contain modules without a rule on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:GramGaussNewton. no rule for:UserWarning"),
    pytest.mark.filterwarnings("ignore:GramGaussNewton. J takes:RuntimeWarning"),
]

Options = Stream | Vmap | Loop | Rows
ENGINES: dict[str, Options] = {
    "stream": Stream(),
    "stream_chunk_1": Stream(chunk_size=1),
    "stream_chunk_2": Stream(chunk_size=2),
    "stream_auto": Stream(chunk_size="auto"),
    "stream_probe": Stream(conv_path="probe"),
    "stream_least_memory": Stream(memory_budget="least"),
    "vmap": Vmap(),
    "vmap_chunk_4": Vmap(chunk_size=4),
    "loop": Loop(),
    "rows": Rows(),
}
THREE = {"stream": Stream(), "vmap": Vmap(), "loop": Loop()}


def cases_of(options: Options) -> list[Case]:
    if isinstance(options, Vmap):
        return list(VMAP_CASES)
    return list(CASES)


def linearised(
    problem: Problem, engine: Engine, trained: Trained | None = None, loss: Loss = SQUARED
) -> Linearisation:
    return engine.linearise(problem.model, trained or problem.trained(), problem.closure, loss)


def of_model(model: nn.Module, closure, engine: Engine) -> Linearisation:
    return engine.linearise(model, all_trained(model), closure, SQUARED)


def dense(J: Linearisation, trained: Trained) -> Tensor:
    """Return J [n, m] row by row."""
    rows = torch.eye(J.reading.residual.numel(), dtype=torch.float64)
    return torch.stack([flattened(vjp(J, trained, row)) for row in rows])


def assert_right(problem: Problem, engine: Engine, expected: Tensor | None = None) -> None:
    """Compare J^T u, J d and G with the Jacobian of the whole batch, for one group and for three."""
    expected = problem.dense_jacobian() if expected is None else expected
    columns = expected.split([p.numel() for p in problem.trained().params.values()], dim=1)
    for num_groups in (1, 3):
        trained = problem.trained(num_groups)
        J = linearised(problem, engine, trained)
        assert relative_error(dense(J, trained), expected) < TOLERANCE
        d = torch.randn(expected.shape[1], dtype=torch.float64)
        assert relative_error(J.jvp(problem.split(d)), expected @ d) < TOLERANCE
        G = J.gram()
        assert G.dtype == torch.float64
        assert torch.equal(G, G.mT)
        for group in range(num_groups):
            own = [c for c, g in zip(columns, trained.groups, strict=True) if g == group]
            of_group = sum((c @ c.T for c in own), torch.zeros_like(G[0]))
            assert float((G[group] - of_group).norm()) <= TOLERANCE * float(expected.square().sum())


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, id=f"{case.name}-{name}")
        for name, options in ENGINES.items()
        for case in cases_of(options)
    ],
)
def test_jacobian_is_that_of_the_whole_batch(case: Case, options: Options) -> None:
    """G01, G02, G05, G06, G08, G10, G14, G17, G21: the table of cases, twice with the same engine."""
    problem, engine = case.make(), options.build()
    assert_right(problem, engine, case.jacobian())
    J = linearised(problem, engine)
    r = problem.closure().detach()
    assert J.reading.residual.shape == r.shape
    assert torch.allclose(J.reading.residual, r, rtol=1e-12, atol=1e-12)
    assert not J.reading.residual.requires_grad
    assert J.num_samples == len(problem.args[0])


@pytest.mark.parametrize("options", THREE.values(), ids=list(THREE))
def test_scales_go_to_the_parameter_they_belong_to_and_empty_groups_have_no_gram_matrix(
    options: Options,
) -> None:
    """G14: an empty group's G is 0, and every parameter's change has its own factor."""
    for name in ("mlp_three_outputs", "tied_weights", "tokens", "resnet_fixup", "convolution_twice"):
        problem, expected = CASES_BY_NAME[name].make(), CASES_BY_NAME[name].jacobian()
        params = problem.trained().params
        trained = Trained(params, tuple(2 * (i % 2) for i in range(len(params))), 3)
        J = linearised(problem, options.build(), trained)
        assert not J.gram()[1].any()
        scales, u = [0.5 - i for i in range(len(params))], torch.randn(len(expected), dtype=torch.float64)
        out = [torch.ones_like(param) for param in params.values()]
        J.add_vjp_(out, u, scales)
        for tensor, scale, part in zip(out, scales, problem.split(expected.T @ u), strict=True):
            assert torch.allclose(tensor, 1 + scale * part, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 3))
def test_any_shape(b: int, outputs: int, chunk_size: int, bias: bool, seed: int) -> None:
    """G05: any batch from one sample up, any number of outputs, chunks smaller and larger than the batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, outputs, bias=bias)).double()
    problem = Problem(model, (torch.randn(b, 3, dtype=torch.float64),), torch.sin)
    for options in (Vmap(chunk_size), Stream(chunk_size=chunk_size)):
        assert_right(problem, options.build())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_agrees_within_its_rounding(case: Case) -> None:
    problem, expected = case.make(), case.jacobian()
    model = copy.deepcopy(problem.model).float()
    args = tuple(arg.float() if arg.is_floating_point() else arg for arg in problem.args)
    J = of_model(model, lambda: problem.residual(model(*args).double()), Stream().build())
    assert relative_error(J.gram()[0], expected @ expected.T) < 1e-4


@pytest.mark.parametrize("options", [Stream(), Stream(chunk_size=2), Vmap()], ids=str)
@pytest.mark.parametrize("name", ["mlp_three_outputs", "resnet_fixup_two_outputs", "tied_weights"])
def test_cross_entropy_equals_the_oracle(options: Options, name: str) -> None:
    problem = CASES_BY_NAME[name].make()
    outputs = problem.model(*problem.args)
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    trained = problem.trained()
    J, oracle = (
        each.build().linearise(
            problem.model, trained, lambda: (problem.model(*problem.args), labels), CrossEntropy()
        )
        for each in (options, Loop())
    )
    assert relative_error(J.gram()[0], oracle.gram()[0]) < TOLERANCE
    assert torch.allclose(J.reading.residual, oracle.reading.residual)
    assert relative_error(dense(J, trained), dense(oracle, trained)) < TOLERANCE


def test_steps_equal_those_of_the_other_engines() -> None:
    after = []
    for options in THREE.values():
        problem = CASES_BY_NAME["resnet_fixup"].make()
        optimizer = GramGaussNewton(
            problem.model, lam=1.0, alpha=0.3, damping_convention="sum", engine=options
        )
        for _ in range(3):
            optimizer.step(problem.closure)
        after.append(problem.flat())
    assert relative_error(after[0], after[2]) < 1e-8
    assert relative_error(after[1], after[2]) < 1e-8


@pytest.mark.parametrize("options", THREE.values(), ids=list(THREE))
def test_weighted_rows_add_up_to_the_batch_gradient_with_frozen_statistics(options: Options) -> None:
    """G01: sum_i r_i J_i is the gradient of 1/2 sum r^2, and the buffers stay bitwise as they were."""
    problem = CASES_BY_NAME["frozen_batch_norm"].make()
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    J = linearised(problem, options.build())
    (0.5 * problem.closure().square().sum()).backward()
    pulled = vjp(J, problem.trained(), J.reading.residual.flatten())
    grads = [param.grad for param in problem.trained().params.values()]
    assert relative_error(flattened(pulled), flattened(grads)) < TOLERANCE
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in problem.model.named_buffers())


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
def test_residual_and_jacobian_share_the_dropout_mask(options: Options) -> None:
    """G16: f = J w holds for a linear model with the same mask only; masks differ between samples."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False), nn.Flatten(0)).double()
    x = torch.ones(4, 64, dtype=torch.float64)
    residuals = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        J = of_model(model, lambda: model(x), options.build())
        residuals.append(J.reading.residual)
        rows = dense(J, all_trained(model))
        assert torch.allclose(rows @ model[1].weight[0], J.reading.residual, rtol=1e-12, atol=1e-12)
        assert len({tuple(row.tolist()) for row in rows}) == 4
        assert set(rows.flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(residuals[0], residuals[1])
    assert not torch.equal(residuals[0], residuals[2])


@pytest.mark.parametrize("options", [Stream(), Vmap()], ids=["stream", "vmap"])
def test_in_place_activation_gives_the_same_jacobian(options: Options) -> None:
    """G08: an in-place ReLU after a layer changes neither outputs nor Jacobian."""
    blocks = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 1)).double()
        x = torch.randn(6, 5, dtype=torch.float64)
        J = of_model(model, lambda model=model, x=x: model(x), options.build())
        blocks.append(torch.cat([dense(J, all_trained(model)), J.reading.residual], dim=1))
    assert torch.allclose(*blocks, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
def test_closure_may_change_the_output_in_place(options: Options) -> None:
    problem = CASES_BY_NAME["mlp"].make()
    target = torch.randn(6, 1, dtype=torch.float64)
    plain, in_place = (
        of_model(problem.model, closure, options.build())
        for closure in (
            lambda: problem.model(*problem.args) - target,
            lambda: problem.model(*problem.args).sub_(target),
        )
    )
    assert torch.allclose(plain.reading.residual, in_place.reading.residual, rtol=1e-12, atol=1e-14)
    assert torch.allclose(plain.gram(), in_place.gram(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", THREE.values(), ids=list(THREE))
def test_keyword_and_nested_arguments_are_split_by_sample(options: Options) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1, bias=False)

        def forward(self, batch: dict[str, list[Tensor]], *, shift: float) -> Tensor:
            return self.layer(batch["parts"][0] * batch["parts"][1] + shift)

    model = Nested().double()
    x, z = torch.randn(2, 5, 4, dtype=torch.float64)
    J = of_model(model, lambda: model({"parts": [x, z]}, shift=2.0) - 1.0, options.build())
    assert torch.allclose(dense(J, all_trained(model)), x * z + 2.0, rtol=1e-12)


@pytest.mark.parametrize("options", THREE.values(), ids=list(THREE))
@pytest.mark.parametrize("name", ["convolutions", "resnet_fixup", "linear", "attention"])
def test_nothing_is_left_on_the_model(name: str, options: Options) -> None:
    """G11: no hook, no replaced forward and no gradient stays, also when the closure raises."""
    problem = CASES_BY_NAME[name].make()
    before = set(vars(problem.model))
    linearised(problem, options.build())

    def failing() -> Tensor:
        problem.model(*problem.args)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        of_model(problem.model, failing, options.build())
    assert set(vars(problem.model)) == before
    assert not has_hooks(problem.model)
    assert all(param.grad is None for param in problem.model.parameters())


@pytest.mark.parametrize("options", THREE.values(), ids=list(THREE))
def test_model_and_closure_are_called_once_by_the_first_step(options: Options) -> None:
    """Hooks of the model see the batch, once."""
    problem, calls = CASES_BY_NAME["mlp"].make(), []
    problem.model.register_forward_hook(lambda _model, args, _output: calls.append(len(args[0])))

    def closure() -> Tensor:
        calls.append("closure")
        return problem.closure()

    of_model(problem.model, closure, options.build())
    assert calls == ["closure", 6]


def test_a_user_defined_forward_is_put_back_and_compared_in_the_first_steps() -> None:
    model = small = nn.Linear(3, 1).double()
    calls: list[int] = []

    def own(x: Tensor) -> Tensor:
        calls.append(len(x))
        return nn.functional.linear(x, small.weight, small.bias)

    model.forward = own
    x, engine = torch.randn(4, 3, dtype=torch.float64), Vmap().build()
    J = of_model(model, lambda: model(x), engine)
    assert model.forward is own
    assert torch.allclose(dense(J, all_trained(model))[:, :3], x)
    # Once for J, sample by sample; and again on the whole batch and in four parts, to see that the samples do not mix.
    assert calls == [1, 4, 1, 1, 1, 1]
    for _ in range(2):
        calls.clear()
        of_model(model, lambda: model(x), engine)
    assert calls == [1]


STREAMS = [Stream(), Stream(chunk_size=2), Stream(memory_budget="least", chunk_size=2)]


@pytest.mark.parametrize("options", STREAMS, ids=str)
def test_what_a_step_used_is_freed_without_the_garbage_collector(options: Stream) -> None:
    """G02: a cycle of references would keep the memory for J until Python happens to look for cycles."""
    names = (
        "mlp",
        "tokens",
        "resnet_fixup",
        "attention",
        "lstm",
        "unknown_layers",
        "recomputed",
        "functions",
    )
    kept, made = {}, [(name, CASES_BY_NAME[name].make(), options.build()) for name in names]
    gc.collect()
    gc.freeze()  # only objects made from here on are looked at
    gc.disable()
    try:
        for name, problem, engine in made:
            for _ in range(2):
                linearised(problem, engine)
            kept[name] = sum(type(thing).__name__ == "Backward" for thing in gc.get_objects())
    finally:
        gc.enable()
        gc.unfreeze()
    assert not any(kept.values()), kept


@pytest.mark.parametrize(
    ("name", "options", "rounds"),
    [
        ("mlp_three_outputs", Stream(), 25),
        ("resnet_fixup", Stream(), 3),
        ("outside_the_layers", Stream(), 3),
        ("mlp_three_outputs", Vmap(), 5),
        ("mlp_three_outputs", Loop(), 5),
    ],
    ids=["stream", "stream_resnet", "stream_fallback", "vmap", "loop"],
)
def test_memory_is_flat_over_many_steps(name: str, options: Options, rounds: int) -> None:
    """G11: steps, failed steps, 1000 evaluations and 50 optimizers leave no tensor and no hook behind."""
    problem = CASES_BY_NAME[name].make()

    def failing() -> Tensor:
        problem.closure()
        raise KeyError("mine")

    def failing_inside(*_: object) -> None:
        raise KeyError("mine")

    last = [module for module in problem.model.modules() if isinstance(module, nn.Linear)][-1]

    def round_of_steps() -> None:
        optimizer = GramGaussNewton(
            problem.model, lam=1.0, alpha=1e3, damping_convention="sum", momentum=0.5, engine=options
        )
        optimizer.step(problem.closure)
        with pytest.raises(KeyError):
            optimizer.step(failing)
        handle = last.register_forward_pre_hook(failing_inside)
        with pytest.raises(KeyError):
            optimizer.step(problem.closure)
        handle.remove()
        with torch.no_grad():
            for _ in range(20):
                problem.closure()
        assert problem.closure().requires_grad

    assert leaves_no_tensor_behind(round_of_steps, rounds)
    assert not has_hooks(problem.model)
