"""The hyper-parameters of one step, read from the parameter groups, where schedulers write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramgn.damping import CONVENTIONS
from gramgn.optim._checks import check_choice, check_flag, check_keys, check_number, check_whole
from gramgn.optim._damping import Damping, beside_sum, warmed_up

OF_GROUP = ("lr", "alpha", "weight_decay")
OF_ALL = (
    "lam",
    "damping_convention",
    "momentum",
    "decoupled_weight_decay",
    "damping_warmup_steps",
    "damping_warmup_factor",
    "max_step_norm",
)
# Keys of torch itself and of its schedulers, and a name for the reader.
OTHERS = ("params", "param_names", "initial_lr", "name")


@dataclass(frozen=True)
class Settings:
    """What one step goes by.

    Attributes:
        lr: Of each group.
        alpha: Of each group, in the configured convention, after warm-up.
        weight_decay: Of each group, in the configured convention (decoupled: as it is).
        lam: lambda.
        momentum: mu.
        damping_convention: What alpha stands beside.
        decoupled_weight_decay: Whether weight decay stays out of the solve.
        max_step_norm: The longest step, or None.
        first: The first group that has something to train.
    """

    lr: tuple[float, ...]
    alpha: tuple[float, ...]
    weight_decay: tuple[float, ...]
    lam: float
    momentum: float
    damping_convention: str
    decoupled_weight_decay: bool
    max_step_norm: float | None
    first: int

    def damping(self, num_samples: int, mean_eigenvalue: float) -> Damping:
        """Return what is added to lam G, for b samples and a mean eigenvalue of G."""
        none = (0.0,) * len(self.alpha)
        return beside_sum(
            self.alpha,
            none if self.decoupled_weight_decay else self.weight_decay,
            self.damping_convention,
            first=self.first,
            num_samples=num_samples,
            mean_eigenvalue=mean_eigenvalue,
        )


def read_settings(groups: Sequence[Mapping[str, Any]], used: Sequence[int], num_steps: int) -> Settings:
    """Return the settings of a step, checked.

    Args:
        groups: The optimizer's parameter groups.
        used: The numbers of those that have something to train, ascending.
        num_steps: The steps taken before this one.

    Raises:
        ValueError: A value is out of range, or differs between groups where all share one.
    """
    for group in groups:
        check_group(group)
    check_shared(groups)
    _check_dampings([groups[number] for number in used], used)
    shared = groups[0]
    warmup = shared["damping_warmup_steps"], shared["damping_warmup_factor"]
    return Settings(
        lr=tuple(float(group["lr"]) for group in groups),
        alpha=tuple(warmed_up(float(group["alpha"]), num_steps, *warmup) for group in groups),
        weight_decay=tuple(float(group["weight_decay"]) for group in groups),
        lam=float(shared["lam"]),
        momentum=float(shared["momentum"]),
        damping_convention=shared["damping_convention"],
        decoupled_weight_decay=shared["decoupled_weight_decay"],
        max_step_norm=shared["max_step_norm"],
        first=used[0],
    )


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a value out of range in one parameter group.

    Raises:
        ValueError: There is one.
    """
    check_number("lr", group["lr"], least=0.0)
    check_number("lam", group["lam"], least=0.0, strict=True)
    check_number("alpha", group["alpha"], least=0.0)
    check_choice("damping_convention", group["damping_convention"], CONVENTIONS)
    check_number("momentum", group["momentum"], least=0.0, below=1.0)
    check_number("weight_decay", group["weight_decay"], least=0.0)
    check_flag("decoupled_weight_decay", group["decoupled_weight_decay"])
    check_whole("damping_warmup_steps", group["damping_warmup_steps"], least=0)
    check_number("damping_warmup_factor", group["damping_warmup_factor"], least=1.0)
    if group["max_step_norm"] is not None:
        check_number("max_step_norm", group["max_step_norm"], least=0.0, strict=True)


def check_new_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse keys and values of a parameter group that a user gives.

    Raises:
        ValueError: A key is unknown, or a value out of range.
    """
    check_keys("a parameter group", group, (*OF_GROUP, *OF_ALL, *OTHERS))
    check_group({**defaults, **group})


def check_shared(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse values that differ between groups although all groups share one linear system.

    Raises:
        ValueError: Some do.
    """
    for key in OF_ALL:
        values = [group[key] for group in groups]
        for number, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"{key} must be the same in all parameter groups, which share one linear system: group 0 has "
                    f"{values[0]!r}, group {number} has {value!r}. Only {', '.join(OF_GROUP)} may differ"
                )


def _check_dampings(groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
    """Refuse different dampings of which one is 0: no system of finite weights has that step."""
    inside = [
        (float(group["alpha"]), 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"]))
        for group in groups
    ]
    if len({alpha + wd for alpha, wd in inside}) > 1 and any(alpha == 0 for alpha, _ in inside):
        given = ", ".join(f"group {n}: {alpha:g}" for n, (alpha, _) in zip(numbers, inside, strict=True))
        raise ValueError(
            f"parameter groups with different damping need alpha > 0 in each, got {given}. Give each group an "
            "alpha, or all of them 0 and no weight_decay inside of the solve (minimum norm)"
        )
