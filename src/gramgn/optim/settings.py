"""The hyper-parameters: which values are allowed, and what one step reads from the parameter groups.

Schedulers write to the parameter groups, so they are read and checked once per step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

from gramgn.damping import CONVENTIONS, sum_scale

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
# Keys of torch itself and of its schedulers, and a name for the user.
OTHERS = ("params", "param_names", "initial_lr", "name")


@dataclass(frozen=True)
class Damping:
    """Damping and weight decay inside the solve by parameter group, in the *sum* convention."""

    alpha: tuple[float, ...]  # of each group
    weight_decay: tuple[float, ...]  # of each group; 0 where it is decoupled
    first: int  # the first group that has something to train

    @cached_property
    def total(self) -> tuple[float, ...]:
        """What each group adds to the diagonal: alpha + wd."""
        return tuple(alpha + wd for alpha, wd in zip(self.alpha, self.weight_decay, strict=True))

    @property
    def of_system(self) -> float:
        """The damping of the system that is solved: alpha + wd of the first group."""
        return self.total[self.first]

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The weight of each group's J_g J_g^T in that system: of_system / (alpha + wd); 1 for one group."""
        return tuple(self.of_system / total if total > 0 else 1.0 for total in self.total)


@dataclass(frozen=True)
class Settings:
    """The hyper-parameters of one step; alpha and weight decay in the configured convention."""

    lr: tuple[float, ...]  # of each group
    alpha: tuple[float, ...]  # of each group, after warm-up
    weight_decay: tuple[float, ...]  # of each group (decoupled: as it is)
    lam: float
    momentum: float  # mu
    damping_convention: str
    decoupled_weight_decay: bool
    warmup: float  # the factor of alpha in the warm-up of damping; 1 after it
    max_step_norm: float | None  # None: no limit
    first: int  # the first group that has something to train

    def damping(self, num_samples: int, mean_eigenvalue: float) -> Damping:
        """Return alpha and weight decay in the sum convention; `mean_eigenvalue` is trace(G) / n.

        Weight decay belongs to the objective and not to the step, so with `"trace"` it is relative to the mean.
        """
        convention = self.damping_convention
        of_alpha = sum_scale(convention, num_samples=num_samples, mean_eigenvalue=mean_eigenvalue)
        of_decay = sum_scale("sum" if convention == "sum" else "mean", num_samples=num_samples)
        inside = not self.decoupled_weight_decay
        return Damping(
            tuple(alpha * of_alpha for alpha in self.alpha),
            tuple(wd * of_decay if inside else 0.0 for wd in self.weight_decay),
            self.first,
        )

    def with_alpha(self, groups: Sequence[Mapping[str, Any]]) -> Settings:
        """Return these settings with the alpha that the parameter groups hold now."""
        return replace(self, alpha=tuple(float(group["alpha"]) * self.warmup for group in groups))


def check_groups(groups: Sequence[Mapping[str, Any]], used: Iterable[int]) -> bool:
    """Reject values out of range, and those that do not go together; return True. `used`: groups with parameters."""
    for group in groups:
        check_group(group)
    check_shared(groups)
    numbers = sorted(set(used))
    _check_dampings([groups[number] for number in numbers], numbers)
    return True


def read_settings(groups: Sequence[Mapping[str, Any]], first: int, num_steps: int) -> Settings:
    """Return the settings of a step, from checked groups. `first`: the first group that has something to train."""
    shared = groups[0]
    settings = Settings(
        lr=tuple(float(group["lr"]) for group in groups),
        alpha=(),
        weight_decay=tuple(float(group["weight_decay"]) for group in groups),
        lam=float(shared["lam"]),
        momentum=float(shared["momentum"]),
        damping_convention=shared["damping_convention"],
        decoupled_weight_decay=shared["decoupled_weight_decay"],
        warmup=_warmup(num_steps, shared["damping_warmup_steps"], shared["damping_warmup_factor"]),
        max_step_norm=shared["max_step_norm"],
        first=first,
    )
    return settings.with_alpha(groups)


def _warmup(num_steps: int, warmup_steps: int, factor: float) -> float:
    """Return the factor of alpha in its warm-up: `factor` in the first step, falling geometrically to 1."""
    return factor ** (1 - num_steps / warmup_steps) if num_steps < warmup_steps else 1.0


def check_group(group: Mapping[str, Any]) -> None:
    """Reject a value out of range in one parameter group."""
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
    """Reject unknown keys and values out of range of a parameter group that a user gives."""
    check_keys("a parameter group", group, (*OF_GROUP, *OF_ALL, *OTHERS))
    check_group({**defaults, **group})


def check_shared(groups: Sequence[Mapping[str, Any]]) -> None:
    """Reject values that differ between groups although all groups share one linear system."""
    for key in OF_ALL:
        values = [group[key] for group in groups]
        for number, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"{key} must be the same in all parameter groups, which share one linear system: group 0 has "
                    f"{values[0]!r}, group {number} has {value!r}. Only {', '.join(OF_GROUP)} may differ"
                )


def _check_dampings(groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
    """Reject different dampings of which one is 0: no system of finite weights has that step."""
    inside = [
        (float(group["alpha"]), 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"]))
        for group in groups
    ]
    if len({alpha + wd for alpha, wd in inside}) > 1 and any(alpha == 0 for alpha, _ in inside):
        given = ", ".join(f"group {n}: {alpha:g}" for n, (alpha, _) in zip(numbers, inside, strict=True))
        raise ValueError(
            f"parameter groups with different damping need alpha > 0 in each, got {given}. Give each group an "
            "alpha, or set all of them to 0 without weight_decay inside the solve (minimum norm)"
        )


def check_number(
    name: str, value: Any, *, least: float, strict: bool = False, below: float = math.inf
) -> float:
    """Return `value` as a float if it is a finite number in range; `strict` excludes `least` itself."""
    bound = f"{'>' if strict else '>='} {least:g}" + (f" and < {below:g}" if below < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number {bound}, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or number < least or number >= below or (strict and number == least):
        raise ValueError(f"{name} must be a finite number {bound}, got {number!r}")
    return number


def check_whole(name: str, value: Any, *, least: int, others: str = "") -> int:
    """Return `value` if it is a whole number of at least `least`. `others`: more valid values, for the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {others}a whole number of at least {least}, got {value!r}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def check_keys(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Reject keys that nothing would read; the message holds the nearest and all known ones."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no {key!r}: {hint}Valid keys: {', '.join(sorted(known))}")
