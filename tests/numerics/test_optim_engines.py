"""Every engine forms the same Jacobian as autograd on the whole batch, which knows nothing of samples."""

from __future__ import annotations

import gc

import pytest
import torch
from cases import CASES_BY_NAME, VMAP_CASES, Case, Problem, all_trained, vjp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.optim import BlockLinearisation, LoopEngine, SquaredError, Trained, VmapEngine, make_engine

TOLERANCE = 1e-10
SQUARED = SquaredError()
ENGINES = {
    "vmap": VmapEngine(),
    "vmap_chunk_1": VmapEngine(1),
    "vmap_chunk_4": VmapEngine(4),
    "loop": LoopEngine(),
}


def linearised(problem: Problem, engine: VmapEngine | LoopEngine) -> BlockLinearisation:
    return engine.linearise(problem.model, problem.trained(), problem.closure, SQUARED)


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("case", VMAP_CASES, ids=lambda case: case.name)
def test_jacobian_is_that_of_the_whole_batch(case: Case, engine: VmapEngine | LoopEngine) -> None:
    """G01 (frozen statistics), G02 (chunks), G06 (frozen), G17 (tied, used twice), G21 (all parameters)."""
    problem = case.make()
    expected = problem.dense_jacobian()
    J = linearised(problem, engine)
    assert relative_error(torch.cat(list(J.blocks), dim=1), expected) < TOLERANCE
    assert torch.allclose(
        J.reading.residual.flatten(), problem.residual_at(problem.flat()), rtol=1e-12, atol=1e-12
    )
    assert J.reading.residual.shape == problem.closure().shape
    assert J.num_samples == len(problem.args[0])
    assert not J.reading.residual.requires_grad


@pytest.mark.parametrize("case", VMAP_CASES, ids=lambda case: case.name)
def test_gram_and_vjp_are_products_of_that_jacobian(case: Case) -> None:
    problem = case.make()
    expected = problem.dense_jacobian()
    J = linearised(problem, VmapEngine())
    assert J.gram().dtype == torch.float64
    assert J.gram().shape == (1, len(expected), len(expected))
    assert relative_error(J.gram()[0], expected @ expected.T) < TOLERANCE
    u, d = torch.randn(len(expected), dtype=torch.float64), torch.randn_like(expected[0])
    pulled = vjp(J, problem.trained(), u)
    assert relative_error(torch.cat([part.flatten() for part in pulled]), expected.T @ u) < TOLERANCE
    assert relative_error(J.jvp(split(problem, d)), expected @ d) < TOLERANCE


def split(problem: Problem, d: Tensor) -> list[Tensor]:
    """Return d [m] in the parameters' shapes."""
    params = list(problem.trained().params.values())
    parts = d.split([param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


@pytest.mark.parametrize("engine", ["stream", "vmap", "loop"])
@pytest.mark.parametrize(
    "name", ["mlp_three_outputs", "tied_weights", "tokens", "resnet_fixup", "convolution_twice"]
)
def test_groups_share_out_the_gram_matrix(name: str, engine: str) -> None:
    """G14: one G for each parameter group, an empty one's is 0; scales go to the parameter they belong to."""
    problem = CASES_BY_NAME[name].make()
    params = problem.trained().params
    trained = Trained(params, tuple(2 * (i % 2) for i in range(len(params))), 3)
    columns = problem.dense_jacobian().split([param.numel() for param in params.values()], dim=1)
    made = make_engine(engine)
    J = made.linearise(problem.model, trained, problem.closure, SQUARED)
    G = J.gram()
    for group in (0, 2):
        dense = torch.cat([c for c, g in zip(columns, trained.groups, strict=True) if g == group], dim=1)
        assert relative_error(G[group], dense @ dense.T) < TOLERANCE
    assert not G[1].any()
    scales, u = [0.5 - i for i in range(len(params))], torch.randn(len(G[0]), dtype=torch.float64)
    out = [torch.ones_like(param) for param in params.values()]
    J.add_vjp_(out, u, scales)
    for tensor, scale, c in zip(out, scales, columns, strict=True):
        assert torch.allclose(tensor.flatten(), 1 + scale * (c.T @ u), rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 3))
def test_any_shape(b: int, outputs: int, chunk_size: int, bias: bool, seed: int) -> None:
    """G05: any batch from one sample up, any number of outputs, chunks smaller and larger than the batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, outputs, bias=bias)).double()
    problem = Problem(model, (torch.randn(b, 3, dtype=torch.float64),), torch.sin)
    J = linearised(problem, VmapEngine(chunk_size))
    assert relative_error(torch.cat(list(J.blocks), dim=1), problem.dense_jacobian()) < TOLERANCE


def test_weighted_rows_add_up_to_the_batch_gradient_with_frozen_statistics() -> None:
    """G01: sum_i r_i J_i is the gradient of 1/2 sum r^2 and the buffers stay bitwise as they were."""
    problem = CASES_BY_NAME["frozen_batch_norm"].make()
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    J = linearised(problem, VmapEngine())
    (0.5 * problem.closure().square().sum()).backward()
    for pulled, param in zip(
        vjp(J, problem.trained(), J.reading.residual.flatten()),
        problem.trained().params.values(),
        strict=True,
    ):
        assert torch.allclose(pulled, param.grad, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in problem.model.named_buffers())


class Noisy(nn.Module):
    """Remembers nothing: its mask can only be told from what comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(64, 1, bias=False), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.dropout(x)).squeeze(1)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_residual_and_jacobian_share_the_dropout_mask(engine: VmapEngine | LoopEngine) -> None:
    """G16: f = J w holds for a linear model with the same mask only; masks differ between samples."""
    torch.manual_seed(3)
    model = Noisy().double()
    x = torch.ones(4, 64, dtype=torch.float64)
    J = engine.linearise(model, all_trained(model), lambda: model(x), SQUARED)
    (block,) = J.blocks
    assert torch.allclose(block @ model.layer.weight[0], J.reading.residual, rtol=1e-12, atol=1e-12)
    assert len({tuple(row.tolist()) for row in block}) == 4
    assert set(block.flatten().tolist()) == {0.0, 2.0}


def test_dropout_is_seeded() -> None:
    """G16: the same seed gives the same step, another one another."""
    model = Noisy().double()
    x = torch.ones(4, 64, dtype=torch.float64)
    residuals = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        residuals.append(
            VmapEngine().linearise(model, all_trained(model), lambda: model(x), SQUARED).reading.residual
        )
    assert torch.equal(residuals[0], residuals[1])
    assert not torch.equal(residuals[0], residuals[2])


def test_in_place_activation_gives_the_same_jacobian() -> None:
    """G08: an in-place ReLU after a layer changes neither outputs nor Jacobian."""
    blocks = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 1)).double()
        x = torch.randn(6, 5, dtype=torch.float64)
        J = VmapEngine().linearise(model, all_trained(model), lambda model=model, x=x: model(x), SQUARED)
        blocks.append(torch.cat([*J.blocks, J.reading.residual], dim=1))
    assert torch.equal(blocks[0], blocks[1])


def test_closure_may_change_the_output_in_place() -> None:
    problem = CASES_BY_NAME["mlp"].make()
    target = torch.randn(6, 1, dtype=torch.float64)
    trained = problem.trained()
    plain = VmapEngine().linearise(
        problem.model, trained, lambda: problem.model(*problem.args) - target, SQUARED
    )
    in_place = VmapEngine().linearise(
        problem.model, trained, lambda: problem.model(*problem.args).sub_(target), SQUARED
    )
    assert torch.equal(plain.reading.residual, in_place.reading.residual)
    assert torch.equal(plain.gram(), in_place.gram())


def test_keyword_and_nested_arguments_are_split_by_sample() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, batch: dict[str, list[Tensor]], *, shift: float) -> Tensor:
            return self.layer(batch["parts"][0] * batch["parts"][1] + shift)

    model = Nested().double()
    x, z = torch.randn(2, 5, 4, dtype=torch.float64)
    J = VmapEngine().linearise(
        model, all_trained(model), lambda: model({"parts": [x, z]}, shift=2.0) - 1.0, SQUARED
    )
    assert torch.allclose(J.blocks[0], x * z + 2.0, rtol=1e-12)


@pytest.mark.parametrize("engine", [VmapEngine(), LoopEngine()], ids=["vmap", "loop"])
def test_nothing_is_left_on_the_model(engine: VmapEngine | LoopEngine) -> None:
    """G11: no hook and no replaced forward stays, also when the closure raises; no tensor is kept."""
    problem = CASES_BY_NAME["convolutions"].make()
    before = set(vars(problem.model))
    linearised(problem, engine)

    def failing() -> Tensor:
        problem.model(*problem.args)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.linearise(problem.model, problem.trained(), failing, SQUARED)
    assert set(vars(problem.model)) == before
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, hook) for module in problem.model.modules() for hook in hooks)
    assert all(param.grad is None for param in problem.model.parameters())


def test_a_forward_of_the_users_own_is_put_back() -> None:
    model = small = nn.Linear(3, 1).double()
    calls: list[int] = []

    def own(x: Tensor) -> Tensor:
        calls.append(len(x))
        return nn.functional.linear(x, small.weight, small.bias)

    model.forward = own
    x = torch.randn(4, 3, dtype=torch.float64)
    J = VmapEngine().linearise(model, all_trained(model), lambda: model(x), SQUARED)
    assert model.forward is own
    assert torch.allclose(J.blocks[0], x)
    # Once for J, sample by sample; and twice on the whole batch, to see that the samples do not mix.
    assert calls == [1, 4, 4]
    calls.clear()
    engine = VmapEngine()
    for _ in range(2):
        engine.linearise(model, all_trained(model), lambda: model(x), SQUARED)
    assert calls == [1, 4, 4, 1]


def test_hooks_of_the_model_run_once_and_see_the_batch() -> None:
    model = nn.Linear(3, 1).double()
    seen: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda _module, _args, output: seen.append(tuple(output.shape)))
    x = torch.randn(4, 3, dtype=torch.float64)
    VmapEngine().linearise(model, all_trained(model), lambda: model(x), SQUARED)
    assert seen == [(4, 1)]


@pytest.mark.parametrize("engine", ["stream", "vmap", "loop"])
def test_memory_is_flat_over_many_steps(engine: str) -> None:
    """G11: optimizers, their steps and evaluations leave no tensor behind."""
    problem = CASES_BY_NAME["mlp_three_outputs"].make()

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    linearised(problem, VmapEngine())
    before = num_tensors()
    for _ in range(50):
        optimizer = GramGaussNewton(problem.model, lam=1.0, alpha=0.3, momentum=0.9, engine=engine)
        optimizer.step(problem.closure)
        optimizer.step(problem.closure)
        with torch.no_grad():
            problem.closure()
    del optimizer
    assert num_tensors() == before
