"""What the optimizer refuses: before any work, in one sentence that names what was given and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.models import ResNetBN
from gramgn.optim import BlockLinearisation, LoopEngine, SquaredError, Trained, VmapEngine

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(0, 1, 8)


def network(num_outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs))


def built(model: nn.Module, **options: Any) -> GramGaussNewton:
    return GramGaussNewton(model, **{"lam": 1.0, "alpha": 0.3, **options})


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def untracked_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()


def tracked_instance_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True))


@pytest.mark.parametrize(
    "build", [lambda: ResNetBN(8), batch_norm, untracked_batch_norm, tracked_instance_norm]
)
def test_batch_statistics_are_refused_at_construction(build: Callable[[], nn.Module]) -> None:
    """G01: one refusal, with the reason and the models to use."""
    with pytest.raises(
        ValueError, match=r"statistics of the batch.*GroupNorm.*ResNetFixup.*ResNetGN.*\.eval\(\)"
    ):
        built(build())


def test_batch_statistics_are_refused_at_the_step() -> None:
    """G01: accepted with frozen statistics, refused when model.train() unfreezes them; nothing moves."""
    model = batch_norm().eval()
    optimizer = built(model)
    optimizer.step(lambda: model(X)[:, 0] - Y)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="BatchNorm1d at '1' uses the statistics of the batch"):
        optimizer.step(lambda: model(X)[:, 0] - Y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_to_train() -> None:
    """G06: all frozen is an error, at construction and later."""
    model = network()
    optimizer = built(model)
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        optimizer.step(lambda: model(X)[:, 0] - Y)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        built(model)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        GramGaussNewton(model, model.parameters(), lam=1.0, alpha=0.3)
    with pytest.raises(ValueError, match="empty parameter list"):
        GramGaussNewton(model, [], lam=1.0, alpha=0.3)


def test_parameters_of_another_model() -> None:
    with pytest.raises(ValueError, match="are not parameters of the model"):
        GramGaussNewton(network(), network().parameters(), lam=1.0, alpha=0.3)


def test_a_replaced_or_added_module_is_noticed() -> None:
    """G21: a trainable parameter that the optimizer does not know is listed instead of left out."""
    model = network()
    optimizer = built(model)
    model.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"does not know \(3\.weight, 3\.bias\)"):
        optimizer.step(lambda: model(X)[:, 0] - Y)
    model = network()
    optimizer = built(model)
    model[2] = nn.Linear(4, 1)
    with pytest.raises(ValueError, match="build a new optimizer"):
        optimizer.step(lambda: model(X)[:, 0] - Y)


def test_uninitialised_integer_and_scattered_parameters() -> None:
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet"):
        built(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match="only real floating point"):
        built(nn.Linear(2, 1, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\)"):
        built(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1, device="meta")))


def test_no_module() -> None:
    with pytest.raises(ValueError, match=r"got generator: pass the network itself, not"):
        built(network().parameters())  # type: ignore[arg-type]


def test_compiled_and_wrapped_models() -> None:
    """G19: a model compiled in either way is refused, and so are wrappers for several devices."""
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        built(torch.compile(network()))  # type: ignore[arg-type]
    in_place = network()
    in_place.compile()
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        built(in_place)
    with pytest.raises(ValueError, match="DataParallel"):
        built(nn.DataParallel(network()))
    sharded = network()
    next(sharded.parameters()).placements = ()  # type: ignore[attr-defined]  # as of a DTensor
    with pytest.raises(ValueError, match="pass the plain network, whole on each process"):
        built(sharded)


def test_autocast() -> None:
    """G18: refused at construction, around the step and inside the closure."""
    model = network()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast is on"):
        built(model)
    optimizer = built(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast is on"):
        optimizer.step(lambda: model(X)[:, 0] - Y)

    def closure() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(X)[:, 0] - Y

    with pytest.raises(RuntimeError, match="autocast is on"):
        optimizer.step(closure)

    def closure_that_switches_it_off() -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return model(X)[:, 0] - Y

    # The Gram product would still be formed under it.
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast is on"):
        optimizer.step(closure_that_switches_it_off)


def test_inference_mode() -> None:
    model = network()
    optimizer = built(model)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode is on"):
        optimizer.step(lambda: model(X)[:, 0] - Y)


@pytest.mark.parametrize("world_size", ["2", "16"])
def test_one_of_several_processes_that_do_not_know_of_one_another(
    world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G22: WORLD_SIZE > 1 without an initialised torch.distributed is rejected with one line."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(RuntimeError, match=f"WORLD_SIZE={world_size}") as caught:
        built(network())
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    built(network())


def refusal(closure: Callable[[nn.Module], Any], engine: str, model: nn.Module | None = None) -> str:
    """Return the message with which a step is refused, after checking that no parameter moved."""
    model = model or network()
    optimizer = built(model, engine=engine)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"\w") as caught:
        optimizer.step(lambda: closure(model))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert optimizer.counts["steps"] == 0
    return str(caught.value)


ENGINE_NAMES = pytest.mark.parametrize("engine", ["vmap", "stream", "loop"])


@ENGINE_NAMES
def test_broadcast_residuals_are_refused_with_both_shapes(engine: str) -> None:
    """T01: [b, 1] minus [b] is [b, b]; the message holds both shapes."""
    message = refusal(lambda model: model(X) - Y, engine)
    assert "[8, 1]" in message
    assert "[8, 8]" in message
    flat = nn.Sequential(network(), nn.Flatten(0))
    assert "[8, 8]" in refusal(lambda model: model(X) - Y[:, None], "loop", flat)


@ENGINE_NAMES
@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda model: (model(X)[:, 0] - Y).square().mean(), "not a loss"),
        (lambda model: float((model(X)[:, 0] - Y).square().mean().detach()), "as a tensor, got float"),
        (lambda model: model(X)[:4, 0] - Y[:4], "shape [b] or [b, k] with b = 8"),
        (lambda model: model(X)[:, None] - Y[:, None, None], "shape [b] or [b, k]"),
        (lambda model: (model(X)[:, 0] - Y).detach(), "do not depend on the model's output"),
        (lambda model: Y, "did not call the model"),
        (lambda model: model[0](X)[:, 0] - Y, "did not call the model"),
        (lambda model: torch.cat([model(X)[:, 0] - Y, model(X[:3])[:, 0]]), "engine='rows' takes any [n]"),
    ],
    ids=["loss", "number", "part", "dimensions", "detached", "no_call", "part_of_model", "other_batch"],
)
def test_closures_that_break_the_contract(
    closure: Callable[[nn.Module], Any], message: str, engine: str
) -> None:
    assert message in refusal(closure, engine)


def test_residuals_that_mix_samples() -> None:
    """The vmap engine refuses what has no per-sample Jacobian; the loop engine forms the whole one."""

    def centred(model: nn.Module) -> Tensor:
        output = model(X)[:, 0]
        return output - output.mean() - Y

    assert "output of another sample" in refusal(centred, "vmap")
    swapped = torch.arange(4096).reshape(-1, 2).flip(1).flatten()
    assert "output of another sample" in refusal(lambda model: model(X.repeat(512, 1))[swapped, 0], "vmap")
    model = network().double()
    params = dict(model.named_parameters())
    J = LoopEngine().linearise(
        model,
        Trained(params, (0,) * len(params), 1),
        lambda: (f := model(X.double())[:, 0]) - f.mean(),
        SquaredError(),
    )
    assert torch.allclose(J.gram()[0].sum(dim=0), torch.zeros(8, dtype=torch.float64), atol=1e-12)


def test_residuals_that_depend_on_parameters_past_the_output() -> None:
    message = refusal(lambda model: model(X)[:, 0] * model[2].bias - Y, "vmap")
    assert "other than through the model's output" in message


def test_parameters_that_functional_call_does_not_reach() -> None:
    """G21: a parameter used through an alias would get no column; it is named instead."""

    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.alias = [self.layer.weight]

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.alias[0], self.layer.bias)

    message = refusal(lambda model: model(X)[:, 0] - Y, "vmap", Aliased())
    assert "past its own modules" in message
    assert "layer.weight" in message


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: (), "the model returned no tensor"),
        (lambda x: x.sum(dim=0), "must keep the batch in the leading dimension"),
    ],
)
def test_outputs_that_are_no_batch(forward: Callable[[Tensor], Any], message: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return forward(self.layer(x))

    assert message in refusal(lambda model: model(X), "vmap", Odd())


def test_empty_batch() -> None:
    assert "at least one sample" in refusal(lambda model: model(X[:0])[:, 0] - Y[:0], "vmap")


def test_what_vmap_cannot_do_points_to_rows() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.abs().sum() > 0 else -self.layer(x)

    model = Branching()
    with pytest.raises(RuntimeError) as caught:
        built(model, engine="vmap").step(lambda: model(X)[:, 0] - Y)
    assert any("engine='rows'" in note for note in caught.value.__notes__)
    assert built(model, engine="rows").step(lambda: model(X)[:, 0] - Y).status == "cholesky"


class _AssignsABuffer(nn.Module):
    """Keeps what it was last called with, under the same name but in another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().sum(dim=0)
        return self.linear(x).squeeze(-1)


def test_vmap_refuses_a_forward_that_assigns_a_buffer_and_leaves_it_usable() -> None:
    model = _AssignsABuffer()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.1, engine="vmap")
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"assigns the buffers last.*engine='stream'"):
        optimizer.step(lambda: model(x) - 1.0)
    assert torch.equal(model.last + 1.0, torch.ones(3))
    GramGaussNewton(model, lam=1.0, alpha=0.1).step(lambda: model(x) - 1.0)
    assert torch.equal(model.last, x.sum(dim=0))


def test_running_out_of_memory_names_sizes_and_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """G02: the message holds the number of parameters, an estimate in MiB, the samples and what to lower."""
    model = nn.Linear(1024, 16, bias=False)
    x = torch.zeros(4, 1024)

    def exhausted(*_args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(VmapEngine, "linearise", exhausted)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"16384 parameters.*0\.0625 MiB per row.*chunk_size.*batch size"
    ):
        built(model, engine="vmap").step(lambda: model(x))
    monkeypatch.undo()
    monkeypatch.setattr(BlockLinearisation, "gram", exhausted)
    with pytest.raises(torch.OutOfMemoryError, match=r"about 4 MiB for 4 samples \(64 rows\)"):
        built(model, engine="vmap").step(lambda: model(x))


@pytest.mark.parametrize("engine", ["stream", "vmap"])
def test_a_gram_matrix_that_does_not_fit(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G02: of a small network and many samples it is G that takes the memory, whatever the engine does with J."""
    monkeypatch.setattr("gramgn.optim.runtime.free_bytes", lambda device: 2**30)
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    with pytest.raises(
        torch.OutOfMemoryError, match=r"G of 16384 rows .* takes 2 GiB.* Lower the batch size"
    ):
        built(model, engine=engine).step(lambda: model(torch.zeros(16384, 3)))
    assert torch.equal(model.weight, before)


class Centred(nn.Module):
    """Mixes samples: subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0))[:, 0]


class Weighted(nn.Module):
    """Takes a second tensor that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return self.linear(x)[:, 0] * shared.sum()


def test_a_forward_that_mixes_samples_is_refused() -> None:
    """G01's kind: no batch norm in sight, and still an output depends on the other samples.

    vmap calls the model on one sample and would centre it to 0. The others run the batch as it is, and what no
    parameter stands before is no mixture of Jacobians.
    """
    model = Centred()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="other outputs within a batch than for one sample alone"):
        built(model, engine="vmap").step(lambda: model(X) - Y)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    steps = []
    for engine in ("loop", "stream"):
        model = Centred()
        model.load_state_dict(dict(zip(("linear.weight", "linear.bias"), before, strict=True)))
        built(model, engine=engine).step(lambda model=model: model(X) - Y)
        steps.append(model.linear.weight.detach())
    assert torch.allclose(*steps, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_shared_tensor_as_long_as_the_batch_is_refused_not_split(length: int) -> None:
    model, shared = Weighted(), torch.linspace(0.5, 1.5, length)
    optimizer = built(model, engine="vmap")
    if length == len(X):
        with pytest.raises(ValueError, match="has as many entries as the batch"):
            optimizer.step(lambda: model(X, shared) - Y)
    else:
        expected = float((model(X, shared) - Y).square().mean().detach())
        assert optimizer.step(lambda: model(X, shared) - Y).loss == pytest.approx(expected)


def test_a_shared_tensor_is_noticed_at_a_later_batch_size() -> None:
    """The last, smaller batch may be the first one that has the length of the shared tensor."""
    model, shared = Weighted(), torch.linspace(0.5, 1.5, 5)
    optimizer = built(model, engine="vmap")
    optimizer.step(lambda: model(X, shared) - Y)
    with pytest.raises(ValueError, match="has as many entries as the batch"):
        optimizer.step(lambda: model(X[:5], shared) - Y[:5])


def test_dropout_is_not_taken_for_mixing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Flatten(0))
    state = torch.get_rng_state()
    assert built(model).step(lambda: model(X) - Y).status == "cholesky"
    assert not torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_an_empty_batch_is_refused(engine: str) -> None:
    model = network()
    with pytest.raises(ValueError, match="at least one sample"):
        built(model, engine=engine).step(lambda: model(X[:0])[:, 0] - Y[:0])
