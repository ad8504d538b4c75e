"""State: saved and loaded exactly, checked before anything changes, copied together with the model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import GramGaussNewton, StepInfo, Stream

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"damping_convention": "mean"},
    "momentum_and_decay": {"momentum": 0.9, "weight_decay": 0.1},
    "warmup": {"damping_warmup_steps": 6},
    "adaptive": {"adaptive_damping": {"factor": 3.0}, "momentum": 0.5},
    "line_search": {"line_search": "armijo", "momentum": 0.5, "max_step_norm": 1.0},
}


def network(seed: int = 0, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1)).double()


def built(**options: Any) -> tuple[nn.Sequential, GramGaussNewton]:
    model = network()
    return model, GramGaussNewton(model, **{"lam": 1.0, "alpha": 0.3, **options})


def take(model: nn.Module, optimizer: GramGaussNewton, steps: int = 1) -> StepInfo:
    for _ in range(steps):
        info = optimizer.step(lambda: model(X) - Y)
    return info


def parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def plain_values(state: Any) -> Any:
    """Return a state with tensors as lists, to compare."""
    if isinstance(state, dict):
        return {key: plain_values(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


@pytest.mark.parametrize(
    ("engine", "through_file"), [("stream", False), ("stream", True), ("vmap", True), ("loop", True)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_is_exact(variant: str, engine: str, through_file: bool) -> None:
    """G09: continue, reload and cold start: the first two are bitwise equal, the third is not.

    Momentum, the damping that was adapted, the number of steps (for the warm-up), and the generator's state.
    """
    kept = {
        key: VARIANTS[variant][key] for key in VARIANTS[variant] if key in ("adaptive_damping", "line_search")
    }
    model, optimizer = built(engine=engine, **VARIANTS[variant])
    optimizer.param_groups[0].update(alpha=0.7, lr=0.5)
    take(model, optimizer, steps=3)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if through_file:
        # T05: plain values and tensors only, so that torch.load's safe default reads it.
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    torch.manual_seed(7)
    take(model, optimizer, steps=2)

    reloaded = network(seed=1)
    other = GramGaussNewton(reloaded, lam=2.0, alpha=0.1, engine=engine, **kept)
    reloaded.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    torch.manual_seed(7)
    take(reloaded, other, steps=2)
    assert torch.equal(parameters(reloaded), parameters(model))
    assert other.counts == optimizer.counts
    assert other.counts["steps"] == 5
    assert plain_values(other.state_dict()) == plain_values(optimizer.state_dict())

    cold = network()
    cold.load_state_dict(state["model"])
    torch.manual_seed(7)
    take(cold, GramGaussNewton(cold, lam=2.0, alpha=0.1, engine=engine, **kept), steps=2)
    assert not torch.equal(parameters(cold), parameters(model))


def test_state_dict_holds_no_model() -> None:
    _, optimizer = built()
    state = optimizer.state_dict()
    assert state["state"] == {}
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert state["gram_gauss_newton"]["engine"]["name"] == "stream"


def test_momentum_is_in_the_state_in_the_parameters_shapes() -> None:
    """Until momentum is set to 0: then nothing stale is kept."""
    model, optimizer = built(momentum=0.9)
    before = parameters(model)
    take(model, optimizer)
    moved = torch.cat([optimizer.state[param]["direction"].flatten() for param in model.parameters()])
    assert torch.allclose(parameters(model) - before, moved, rtol=1e-12, atol=1e-15)
    optimizer.param_groups[0]["momentum"] = 0.0
    take(model, optimizer)
    assert optimizer.state_dict()["state"] == {}


def test_what_the_engine_measured_is_kept() -> None:
    """G09: a resumed run takes the kernels that were chosen; an engine of another name makes its own choice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 1))
    x = torch.randn(4, 1, 5, 5)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, engine=Stream(conv_path="probe"))
    optimizer.step(lambda: model(x) - 1.0)
    state = optimizer.state_dict()
    choices = state["gram_gauss_newton"]["engine"]["choices"]
    assert choices["conv_paths"]
    other = GramGaussNewton(model, lam=1.0, alpha=0.3, engine=Stream(conv_path="probe"))
    assert other.state_dict()["gram_gauss_newton"]["engine"]["choices"] != choices
    other.load_state_dict(state)
    assert other.state_dict() == state
    vmap = GramGaussNewton(model, lam=1.0, alpha=0.3, engine="vmap")
    vmap.load_state_dict(state)
    other.load_state_dict(vmap.state_dict())
    assert other.state_dict()["gram_gauss_newton"]["engine"]["choices"] == choices


def test_state_of_another_optimizer_is_rejected() -> None:
    """G09: loading SGD's state raises by name and changes nothing."""
    model, optimizer = built()
    take(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    foreign = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict()
    with pytest.raises(
        ValueError, match=r"another optimizer, not by GramGaussNewton .*: dampening, .*nesterov"
    ):
        optimizer.load_state_dict(foreign)
    assert optimizer.state_dict() == before


def with_group(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["param_groups"][0].update(values)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["param_groups"][0].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["gram_gauss_newton"].update(format=99), "has format 99, this version reads"),
        (
            lambda state: state["gram_gauss_newton"]["counts"].update(stepz=1),
            "no 'stepz': did you mean 'steps'",
        ),
        (with_group(alpha=-1.0), "alpha must be a finite number"),
        (with_group(lam=float("nan")), "lam must be a finite number"),
        (without("lam"), "has no lam: it is damaged"),
        (with_group(params=[0, 1, 2]), r"groups of \[3\] parameters, the optimizer of \[4\]"),
        (
            lambda state: state["state"][0].update(direction=torch.zeros(2)),
            r"direction of shape \[2\] for parameter 0, which has shape \[6, 4\]",
        ),
    ],
)
def test_damaged_states_are_refused_before_anything_changes(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    model, donor = built(momentum=0.9)
    take(model, donor)
    state = copy.deepcopy(donor.state_dict())
    change(state)
    model, optimizer = built(momentum=0.5, alpha=0.4)
    take(model, optimizer, steps=2)
    before = copy.deepcopy(plain_values(optimizer.state_dict()))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert plain_values(optimizer.state_dict()) == before


def test_state_of_another_network_is_refused() -> None:
    model, optimizer = built(momentum=0.9)
    take(model, optimizer)
    wider = network(width=7)
    with pytest.raises(ValueError, match="belongs to another network"):
        GramGaussNewton(wider, lam=1.0, alpha=0.3).load_state_dict(optimizer.state_dict())
    model = network()
    small = GramGaussNewton(model, model[0].parameters(), lam=1.0, alpha=0.3)
    with pytest.raises(ValueError, match="build it with the same groups"):
        small.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_model_and_optimizer_are_copied_together(way: str, variant: str) -> None:
    model, optimizer = built(**VARIANTS[variant])
    take(model, optimizer, steps=2)
    pair = (model, optimizer)
    twin, other = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for pair_model, pair_optimizer in ((model, optimizer), (twin, other)):
        torch.manual_seed(5)
        take(pair_model, pair_optimizer)
    assert torch.equal(parameters(model), parameters(twin))
    assert other.counts == optimizer.counts
    assert repr(other) == repr(optimizer)
    take(twin, other)
    assert not torch.equal(parameters(model), parameters(twin))
    assert optimizer.counts["steps"] == 3


def test_a_model_that_changes_its_format_keeps_its_momentum() -> None:
    """model.float() after some steps: d follows the parameters; and a float32 state loads into float64."""
    model, optimizer = built(momentum=0.9)
    model.eval()
    take(model, optimizer, steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    model.float()
    info = optimizer.step(lambda: model(X.float()) - Y.float())
    assert info.status == "cholesky"
    assert {optimizer.state[param]["direction"].dtype for param in model.parameters()} == {torch.float32}
    twin, other = built(momentum=0.9)
    twin.load_state_dict(model.double().state_dict())
    other.load_state_dict(state)
    assert {d["direction"].dtype for d in other.state.values()} == {torch.float64}


def test_a_parameter_that_was_frozen_starts_without_momentum() -> None:
    """G06: frozen in between it is bitwise still, and forgets what it did before."""
    model, optimizer = built(momentum=0.9)
    take(model, optimizer)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    take(model, optimizer)
    assert torch.equal(model[0].weight, before)
    assert "direction" not in optimizer.state[model[0].weight]
    model[0].weight.requires_grad_(True)
    take(model, optimizer)
    assert optimizer.state[model[0].weight]["direction"].shape == (6, 4)


@pytest.mark.parametrize(
    "damaged",
    [None, {}, {"gram_gauss_newton": {"format": 2}}, {"gram_gauss_newton": {"format": 2, "counts": {}}}, 5],
    ids=str,
)
def test_a_damaged_state_is_one_clear_message(damaged: Any) -> None:
    """G09: nothing is loaded from what is no state."""
    optimizer = GramGaussNewton(nn.Linear(2, 1), lam=1.0, alpha=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="GramGaussNewton"):
        optimizer.load_state_dict(damaged)
    assert optimizer.state_dict() == before
