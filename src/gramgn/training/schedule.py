"""How the step size, and on request GGN's damping and the momentum, change over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from gramgn.errors import ConfigError, is_number

SHAPES = ("constant", "linear", "cosine", "one_cycle")
UNITS = ("step", "epoch")


@dataclass(frozen=True)
class ScheduleConfig:
    """The course of lr over the whole run (`conf/schedule/`): its configured value times a factor.

    Attributes:
        shape: Of the factor, which falls from 1. `"constant"` (default): 1 throughout. `"linear"`: to 0. `"cosine"`:
            to 0 as half a cosine. `"one_cycle"`: torch's `OneCycleLR`, which also rises as a cosine.
        every: `"step"` (default): the factor changes with every step; `"epoch"`: between epochs.
        warmup: Share of the run in which the factor rises to 1 first, in [0, 1): linearly from almost 0, with
            `"one_cycle"` from 1/25; default 0.
        alpha: By what alpha (GGN) has been multiplied when the factor has fallen to 0, > 0: alpha is multiplied by
            alpha ** (1 - factor) from the factor's greatest value on. None (default): alpha stays.
        momentum: Where momentum has moved to, linearly, when the factor has fallen to 0, in [0, 1). None (default): it
            stays.

    Raises:
        ConfigError: A value is out of range; the message names all of them.
    """

    shape: str = "constant"
    every: str = "step"
    warmup: float = 0.0
    alpha: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"schedule.{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}"
            for name, allowed in (("shape", SHAPES), ("every", UNITS))
            if getattr(self, name) not in allowed
        ]
        if not is_number(self.warmup, 0, 1):
            problems.append(
                f"schedule.warmup={self.warmup!r} must be a share of the run, at least 0 and below 1"
            )
        if self.alpha is not None and not (is_number(self.alpha, 0, math.inf) and self.alpha > 0):
            problems.append(f"schedule.alpha={self.alpha!r} must be a factor above 0, or null")
        if self.momentum is not None and not is_number(self.momentum, 0, 1):
            problems.append(f"schedule.momentum={self.momentum!r} must be at least 0 and below 1, or null")
        if self.shape == "constant":
            problems += [
                f"schedule.{name}={getattr(self, name)!r} follows the fall of lr, but schedule.shape is constant: "
                "choose schedule=linear, cosine or one_cycle"
                for name in ("alpha", "momentum")
                if getattr(self, name) is not None
            ]
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def depends_on_length(self) -> bool:
        """Whether the values of a step depend on the length of the run."""
        return self.shape != "constant" or self.warmup > 0


class Schedule:
    """Sets lr, alpha and momentum in the optimizer's parameter groups before a step.

    The values are a function of the configuration and the step's number, so that nothing is kept in checkpoints. The
    factors come from `torch.optim.lr_scheduler`, driving an optimizer of their own whose lr is the factor.

    Args:
        config: The schedule.
        optimizer: The optimizer with its configured values.

    Raises:
        ConfigError: The optimizer lacks a value that is to change.
    """

    def __init__(self, config: ScheduleConfig, optimizer: torch.optim.Optimizer) -> None:
        self.config, self._optimizer = config, optimizer
        self._factors: list[float] = []
        self._first_fall = self._batches = 0
        groups, name = optimizer.param_groups, type(optimizer).__name__
        if config.depends_on_length and not all(isinstance(group.get("lr"), float | int) for group in groups):
            raise ConfigError(f"schedule.shape={config.shape}: {name} has no lr; use schedule=constant")
        # Other optimizers have an `alpha` of another meaning.
        if config.alpha is not None and not all("lam" in group and "alpha" in group for group in groups):
            raise ConfigError(f"schedule.alpha={config.alpha}: {name} has no damping alpha; leave it null")
        if config.momentum is not None and not all("momentum" in group for group in groups):
            raise ConfigError(f"schedule.momentum={config.momentum}: {name} has no momentum; leave it null")
        self._configured = [
            {key: group[key] for key in ("lr", "alpha", "momentum") if key in group} for group in groups
        ]

    def plan(self, epochs: int, batches: int) -> None:
        """Stretch the schedule over a run.

        Args:
            epochs: Number of epochs.
            batches: Number of batches per epoch.

        Raises:
            ConfigError: torch rejects the schedule for a run of this length.
        """
        self._batches = batches
        if self.config.depends_on_length:
            self._factors = factors(self.config, epochs * (batches if self.config.every == "step" else 1))
            self._first_fall = max(range(len(self._factors)), key=self._factors.__getitem__)

    def apply(self, epoch: int, batch: int) -> None:
        """Set the values for a step, which has `epoch` whole epochs and `batch` batches of the next one before it."""
        if not self._factors:
            return
        unit = epoch * self._batches + batch if self.config.every == "step" else epoch
        factor = self._factors[unit]
        fallen = 1.0 - factor if unit > self._first_fall else 0.0
        for group, configured in zip(self._optimizer.param_groups, self._configured, strict=True):
            group["lr"] = configured["lr"] * factor
            if self.config.alpha is not None:
                group["alpha"] = configured["alpha"] * self.config.alpha**fallen
            if self.config.momentum is not None:
                before = configured["momentum"]
                group["momentum"] = before + fallen * (self.config.momentum - before)


def factors(config: ScheduleConfig, length: int) -> list[float]:
    """Return the factor of lr in each of `length` steps or epochs.

    Raises:
        ConfigError: torch rejects the schedule for this length.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    values = []
    try:
        scheduler = _scheduler(config, optimizer, length)
        for _ in range(length):
            values.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"schedule.warmup={config.warmup} does not fit a run of {length} {config.every}s ({error}): train for "
            "longer, or choose another warmup"
        ) from error
    return values


def _scheduler(config: ScheduleConfig, optimizer: torch.optim.Optimizer, length: int) -> Any:
    if config.shape == "one_cycle":
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=length, pct_start=config.warmup, cycle_momentum=False
        )
    rising = round(config.warmup * length)

    def falling() -> Any:
        rest = max(length - rising, 1)
        if config.shape == "linear":
            return lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=rest)
        if config.shape == "cosine":
            return lr_scheduler.CosineAnnealingLR(optimizer, T_max=rest)
        return lr_scheduler.ConstantLR(optimizer, factor=1.0)

    if not rising:
        return falling()
    first = lr_scheduler.LinearLR(optimizer, start_factor=1.0 / (rising + 1), total_iters=rising)
    return lr_scheduler.SequentialLR(optimizer, [first, falling()], milestones=[rising])
