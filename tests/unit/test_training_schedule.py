"""Schedules of lr, alpha and momentum: torch's sequences, set in the parameter groups, functions of the step alone."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.optim import lr_scheduler

from gramgn.errors import ConfigError
from gramgn.optim import GramGaussNewton
from gramgn.records import settings, with_added
from gramgn.training import AugmentConfig, Schedule, ScheduleConfig, TrainerConfig

EPOCHS, BATCHES = 5, 8
STEPS = EPOCHS * BATCHES


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def values(config: ScheduleConfig, optimizer: torch.optim.Optimizer, key: str = "lr") -> list[float]:
    """Return the value of a key in every step of a run."""
    schedule = Schedule(config, optimizer)
    schedule.plan(EPOCHS, BATCHES)
    found = []
    for step in range(STEPS):
        schedule.apply(*divmod(step, BATCHES))
        found.append(float(optimizer.param_groups[-1][key]))
    return found


def torch_sequence(make: Any, lr: float = 0.3, length: int = STEPS) -> list[float]:
    """Return the lr of each step as a training loop of torch's documentation sets it."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(length):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"shape": "linear"}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS)),
        ({"shape": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        (
            {"shape": "one_cycle", "warmup": 0.3},
            lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS, pct_start=0.3, cycle_momentum=False),
        ),
        (
            {"shape": "cosine", "warmup": 0.1},
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.2, total_iters=4), lr_scheduler.CosineAnnealingLR(o, STEPS - 4)],
                milestones=[4],
            ),
        ),
        ({"shape": "constant"}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_the_sequences_are_torchs(options: dict[str, Any], make: Any) -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.3)
    assert values(ScheduleConfig(**options), optimizer) == pytest.approx(torch_sequence(make), rel=1e-9)


def test_every_epoch_holds_its_value_in_all_steps() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.3)
    expected = torch_sequence(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, EPOCHS), length=EPOCHS)
    found = values(ScheduleConfig(shape="linear", every="epoch"), optimizer)
    assert found == pytest.approx([value for value in expected for _ in range(BATCHES)])


def test_every_group_keeps_its_proportion() -> None:
    """Muon's AdamW part has an lr of its own."""
    first, second = network(), network()
    groups = [{"params": first.parameters(), "lr": 1.0}, {"params": second.parameters(), "lr": 0.01}]
    found = values(ScheduleConfig(shape="linear"), torch.optim.SGD(groups))
    assert found == pytest.approx([0.01 * (1 - step / STEPS) for step in range(STEPS)])


def test_alpha_and_momentum_follow_the_fall_of_lr() -> None:
    def ggn() -> GramGaussNewton:
        return GramGaussNewton(network(), lam=1.0, alpha=0.5, momentum=0.8)

    linear = ScheduleConfig(shape="linear", alpha=100.0, momentum=0.9)
    fallen = [step / STEPS for step in range(STEPS)]
    assert values(linear, ggn(), "alpha") == pytest.approx([0.5 * 100**share for share in fallen])
    assert values(linear, ggn(), "momentum") == pytest.approx([0.8 + 0.1 * share for share in fallen])
    rising = ScheduleConfig(shape="one_cycle", warmup=0.3, alpha=0.1)
    alphas = values(rising, ggn(), "alpha")
    assert alphas[:12] == [0.5] * 12  # lr still rises
    assert alphas == sorted(alphas, reverse=True)
    assert alphas[-1] == pytest.approx(0.05, rel=1e-3)


def test_a_step_in_the_middle_needs_no_history() -> None:
    """T02: a resumed run sets the same values, whatever the optimizer's groups were loaded with."""
    config = ScheduleConfig(shape="one_cycle", warmup=0.3, momentum=0.95)
    whole = values(config, torch.optim.SGD(network().parameters(), lr=0.3, momentum=0.9))
    resumed = torch.optim.SGD(network().parameters(), lr=0.3, momentum=0.9)
    schedule = Schedule(config, resumed)
    schedule.plan(EPOCHS, BATCHES)
    state = resumed.state_dict()
    state["param_groups"][0]["lr"] = 17.0
    resumed.load_state_dict(state)
    schedule.apply(2, 3)
    assert resumed.param_groups[0]["lr"] == whole[2 * BATCHES + 3]


def test_constant_touches_nothing() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.3)
    schedule = Schedule(ScheduleConfig(), optimizer)
    schedule.plan(EPOCHS, BATCHES)
    optimizer.param_groups[0]["lr"] = 5.0
    schedule.apply(1, 0)
    assert optimizer.param_groups[0]["lr"] == 5.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "step"}, "must be one of constant, linear"),
        ({"every": "batch"}, "must be one of step, epoch"),
        ({"warmup": 1.0}, "must be a share of the run"),
        ({"warmup": math.nan}, "must be a share of the run"),
        ({"shape": "linear", "alpha": 0}, "must be a factor above 0"),
        ({"shape": "linear", "momentum": 1.0}, "must be at least 0 and below 1"),
        ({"alpha": 2.0}, "schedule.shape is constant"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScheduleConfig(**options)


def test_what_an_optimizer_lacks_cannot_change() -> None:
    adamw, sgd = torch.optim.AdamW(network().parameters()), torch.optim.SGD(network().parameters(), lr=1.0)
    rms = torch.optim.RMSprop(network().parameters())  # its alpha is another
    with pytest.raises(ConfigError, match="AdamW has no momentum"):
        Schedule(ScheduleConfig(shape="linear", momentum=0.9), adamw)
    for optimizer in (sgd, rms):
        with pytest.raises(ConfigError, match="has no damping alpha"):
            Schedule(ScheduleConfig(shape="linear", alpha=2.0), optimizer)


def test_too_short_a_run_is_named() -> None:
    schedule = Schedule(
        ScheduleConfig(shape="one_cycle", every="epoch", warmup=0.25),
        torch.optim.SGD(network().parameters(), lr=1.0),
    )
    with pytest.raises(ConfigError, match=r"schedule\.warmup=0\.25 does not fit a run of 4 epochs"):
        schedule.plan(4, 2)


def test_what_is_off_identifies_nothing(repository: Path) -> None:
    """Records of versions without these keys stay the same experiments; switched on, they are others."""
    added = with_added({})
    assert added["schedule"] == asdict(ScheduleConfig())
    assert added["augment"] == asdict(AugmentConfig())
    assert added["trainer"] == {"average_decay": TrainerConfig().average_decay}
    for group, choice in (("schedule", "constant"), ("augment", "none")):
        assert yaml.safe_load((repository / f"conf/{group}/{choice}.yaml").read_text()) == added[group]
    before = {"config": {"trainer": {"epochs": 3}, "optimizer": {"lr": 0.1}}}
    now = {"config": with_added(before["config"])}
    assert settings(now) == settings(before)
    for section, key, value in (("schedule", "warmup", 0.1), ("augment", "flip", True)):
        other = with_added(now["config"])
        other[section][key] = value
        assert settings({"config": other}) != settings(before)
