"""The optimizer's state as plain values, and the refusal of another optimizer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gramgn.optim._checks import check_keys
from gramgn.optim._settings import OF_ALL, OF_GROUP, check_group, check_shared

KEY = "gram_gauss_newton"
DIRECTION = "direction"
FORMAT = 2
# Keys of a parameter group by which the usual optimizers give themselves away.
TELLTALES = {"nesterov": "SGD", "betas": "Adam or AdamW", "rho": "Adadelta", "momentum": "RMSprop or SGD"}


@dataclass(frozen=True)
class Saved:
    """A state that was checked.

    Attributes:
        state: What torch's own ``load_state_dict`` reads.
        counts: How often what happened.
        choices: What the engine chose by measuring; empty where it was another engine.
    """

    state: dict[str, Any]
    counts: dict[str, int]
    choices: dict[str, Any]


def pack_state(
    state: dict[str, Any], counts: Mapping[str, int], engine: str, choices: Mapping[str, Any]
) -> dict[str, Any]:
    """Return torch's state dict with counts and the engine's choices beside it."""
    own = {
        "format": FORMAT,
        "counts": dict(counts),
        "engine": {"name": engine, "choices": dict(choices)},
    }
    return {**state, KEY: own}


@contextmanager
def _damage_told() -> Iterator[None]:
    """Say in one message that what is to be loaded lacks what it must have."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this is no state of a GramGaussNewton, or a damaged one ({type(error).__name__}: {error}); nothing "
            "was loaded"
        ) from error


@_damage_told()
def check_state(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    counts: Mapping[str, int],
    engine: str,
) -> Saved:
    """Return what is to be loaded, after looking at all of it.

    Format 1 had plain steps only: what it lacks is set to what such steps are.

    Args:
        state: What ``state_dict`` of a ``GramGaussNewton`` returned.
        groups: The groups of the optimizer that it is loaded into.
        defaults: The hyper-parameters of plain steps.
        counts: The counts of that optimizer.
        engine: The name of its engine.

    Raises:
        ValueError: It is not the state of a ``GramGaussNewton``, of an unknown format, of other parameters, or
            damaged.
    """
    own = state.get(KEY)
    if own is None:
        raise ValueError(_not_ours(state))
    if own.get("format") not in (1, FORMAT):
        raise ValueError(
            f"this GramGaussNewton state has format {own.get('format')!r}, this version reads formats 1 and "
            f"{FORMAT}: load it with the version that saved it"
        )
    check_keys("the counts of a GramGaussNewton state", own["counts"], counts)
    saved = [{**defaults, **group} for group in state["param_groups"]]
    for group in saved:
        missing = [key for key in (*OF_GROUP, *OF_ALL) if key not in group]
        if missing:
            raise ValueError(f"this GramGaussNewton state has no {', '.join(missing)}: it is damaged")
        check_group(group)
    check_shared(saved)
    _check_parameters(state["state"], saved, groups)
    of_engine = own.get("engine", {"name": engine, "choices": {}})
    return Saved(
        state={"state": state["state"], "param_groups": saved},
        counts={name: int(own["counts"].get(name, 0)) for name in counts},
        choices=of_engine["choices"] if of_engine["name"] == engine else {},
    )


def _not_ours(state: Mapping[str, Any]) -> str:
    keys = sorted(key for group in state.get("param_groups", []) for key in group if key != "params")
    owner = next((name for key, name in TELLTALES.items() if key in keys), "another optimizer")
    return (
        f"this state was saved by {owner}, not by GramGaussNewton (its settings: {', '.join(keys) or 'none'}): "
        "load it into an optimizer of its own kind, or start this one without a state"
    )


def _check_parameters(
    state: Mapping[int, Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse directions that do not fit the parameters."""
    sizes, own = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != own:
        raise ValueError(
            f"this GramGaussNewton state has parameter groups of {sizes} parameters, the optimizer of {own}: build "
            "it with the same groups, over the same network"
        )
    for group, mine in zip(saved, groups, strict=True):
        for number, param in zip(group["params"], mine["params"], strict=True):
            direction = state.get(number, {}).get(DIRECTION)
            if direction is not None and direction.shape != param.shape:
                raise ValueError(
                    f"this GramGaussNewton state has a direction of shape {list(direction.shape)} for parameter "
                    f"{number}, which has shape {list(param.shape)}: it belongs to another network"
                )
