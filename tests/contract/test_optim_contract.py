"""The optimizer behaves as torch's own do: groups, schedulers, hooks, repr, what moves and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramgn import GramGaussNewton, StepInfo, Vmap

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)).double()


def built(**options: Any) -> tuple[nn.Sequential, GramGaussNewton]:
    model = network()
    return model, GramGaussNewton(model, **{"lam": 1.0, "alpha": 0.3, **options})


def take(model: nn.Module, optimizer: GramGaussNewton, steps: int = 1) -> StepInfo:
    for _ in range(steps):
        info = optimizer.step(lambda: model(X) - Y)
    return info


def parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_is_a_torch_optimizer_with_its_hyperparameters_in_one_group() -> None:
    model, optimizer = built(lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    (group,) = optimizer.param_groups
    assert group["params"] == list(model.parameters())
    assert {key: group[key] for key in ("lr", "lam", "alpha", "damping_convention")} == {
        "lr": 0.5,
        "lam": 1.0,
        "alpha": 0.3,
        "damping_convention": "mean",
    }


def test_step_lowers_the_loss_and_counts() -> None:
    model, optimizer = built()
    model.eval()
    losses = [take(model, optimizer).loss for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.counts == {
        "steps": 4,
        "cholesky": 4,
        "eigh": 0,
        "minimum_norm": 0,
        "non_finite": 0,
        "ill_conditioned": 0,
        "rejected": 0,
        "given_up": 0,
    }


def test_lr_scales_the_step() -> None:
    moves = []
    for lr in (1.0, 0.25):
        model, optimizer = built(lr=lr)
        model.eval()
        before = parameters(model)
        take(model, optimizer)
        moves.append(parameters(model) - before)
    assert torch.allclose(0.25 * moves[0], moves[1], rtol=1e-12, atol=0)


def test_schedulers_change_lr_and_users_change_lam_and_alpha() -> None:
    """T11: what stands in the group is what the next step uses."""
    model, optimizer = built()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    infos = []
    for step in range(3):
        optimizer.param_groups[0]["alpha"] = 0.3 + step
        optimizer.param_groups[0]["lam"] = 1.0 + step
        infos.append(take(model, optimizer))
        scheduler.step()
    assert [(info.lam, info.alpha) for info in infos] == [(1.0, 0.3), (2.0, 1.3), (3.0, 2.3)]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_schedulers_of_groups_and_of_momentum() -> None:
    """T11, G14: one length for each group, and OneCycleLR, which cycles momentum too."""
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}]
    optimizer = GramGaussNewton(model, groups, lam=1.0, alpha=0.3, damping_convention="sum")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.1, lambda n: 1.0 / (n + 1)])
    take(model, optimizer)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5]
    optimizer.add_param_group({"params": [], "lr": 0.7})
    assert take(model, optimizer).lr == 0.05
    model, optimizer = built(momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.8, total_steps=4)
    for _ in range(3):
        take(model, optimizer)
        cycle.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.95)


def test_a_layer_added_later_comes_with_a_group() -> None:
    """G21: until then the step names it."""
    model, optimizer = built()
    model.append(nn.Linear(1, 1).double())
    with pytest.raises(ValueError, match=r"does not know \(4\.weight, 4\.bias\)"):
        take(model, optimizer)
    optimizer.add_param_group({"params": model[4].parameters(), "alpha": 3.0})
    before = model[4].weight.detach().clone()
    take(model, optimizer)
    assert not torch.equal(model[4].weight, before)


@pytest.mark.parametrize(
    ("key", "value"), [("lam", 0.0), ("alpha", -1.0), ("lr", float("nan")), ("alpha", "big")]
)
def test_values_written_by_a_scheduler_are_checked(key: str, value: object) -> None:
    model, optimizer = built()
    before = parameters(model)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=f"{key} must be"):
        take(model, optimizer)
    assert torch.equal(parameters(model), before)


def test_repr_shows_the_hyperparameters() -> None:
    options = {
        "momentum": 0.5,
        "loss": "cross_entropy",
        "line_search": "armijo",
        "engine": Vmap(chunk_size=4),
    }
    text = repr(built(alpha=0.25, damping_convention="mean", **options)[1])
    assert text.startswith("GramGaussNewton (\n    loss: cross_entropy\n    acceptance: Armijo(c=0.0001, ")
    for line in ("alpha: 0.25", "damping_convention: mean", "lam: 1.0", "lr: 1.0", "momentum: 0.5"):
        assert line in text.split("Parameter Group 0")[1]
    assert "engine: Vmap(chunk_size=4)" in text.split("Parameter Group 0")[0]


def test_gradients_are_neither_read_nor_written() -> None:
    model, optimizer = built()
    model.eval()
    take(model, optimizer)
    assert all(param.grad is None for param in model.parameters())
    expected = parameters(model)
    model, optimizer = built()
    model.eval()
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e6)
    take(model, optimizer)
    assert torch.equal(parameters(model), expected)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_step_hooks_of_torch_run() -> None:
    model, optimizer = built()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    take(model, optimizer)
    assert seen == ["pre", "post"]


def test_the_closure_is_called_once_with_gradients_on() -> None:
    model, optimizer = built()
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return model(X) - Y

    with torch.no_grad():
        optimizer.step(closure)
    assert calls == [True]


def test_training_mode_is_left_alone() -> None:
    model, optimizer = built()
    take(model, optimizer)
    assert all(module.training for module in model.modules())


def test_only_the_parameters_that_were_given_move() -> None:
    """G06: a subset of the parameters, given as a list, a group or named; the rest stays bitwise."""
    for params in (list, lambda p: [{"params": list(p)}], iter):
        model = network()
        optimizer = GramGaussNewton(
            model, params(model[0].parameters()), lam=1.0, alpha=0.3, damping_convention="sum"
        )
        before = [param.detach().clone() for param in model.parameters()]
        take(model, optimizer)
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert moved == [True, True, False, False]


def test_freezing_and_unfreezing_between_steps() -> None:
    """G06: a parameter frozen after construction has no column and stays bitwise until it is unfrozen."""
    model, optimizer = built()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    take(model, optimizer)
    assert torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    take(model, optimizer)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("bad", ["nan_input", "inf_target", "overflow"])
def test_nothing_moves_where_something_is_not_finite(bad: str) -> None:
    """G04: parameters stay bitwise, the step is counted, and one warning is given."""
    model, optimizer = built()
    model.eval()
    x, y = X.clone(), Y.clone()
    if bad == "nan_input":
        x[3] = float("nan")
    elif bad == "inf_target":
        y[3] = float("inf")
    else:
        y[3] = 1e308  # its square, and the step, overflow
        optimizer.param_groups[0]["lr"] = 1e10
    before = parameters(model)
    with pytest.warns(RuntimeWarning, match="this step changed no parameter") as caught:
        infos = [optimizer.step(lambda: model(x) - y) for _ in range(2)]
    assert len(caught) == 1
    assert torch.equal(parameters(model), before)
    assert [info.status for info in infos] == ["non_finite"] * 2
    assert infos[0].step_norm == 0.0
    assert optimizer.counts["non_finite"] == optimizer.counts["steps"] == 2
    optimizer.param_groups[0]["lr"] = 1.0
    assert take(model, optimizer).status == "cholesky"
    assert not torch.equal(parameters(model), before)


def test_spectrum_of_a_non_finite_gram_matrix_is_nan() -> None:
    model, optimizer = built()
    x = X.clone()
    x[0] = float("nan")
    with pytest.warns(RuntimeWarning, match="not finite"):
        info = optimizer.step(lambda: model(x) - Y)
    assert all(value != value for value in (*info.spectrum(), info.predicted_decrease, info.loss))
