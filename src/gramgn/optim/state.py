"""The optimizer's state as plain values, checked as a whole before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gramgn.optim.settings import OF_ALL, OF_GROUP, check_group, check_keys, check_shared

KEY = "gram_gauss_newton"
DIRECTION = "direction"
FORMAT = 2


Saved = tuple[dict[str, Any], dict[str, int], dict[str, Any]]
"""What torch's own `load_state_dict` reads, the counts, and the engine's choices (empty: another engine's)."""


def pack_state(
    state: dict[str, Any], counts: Mapping[str, int], engine: str, choices: Mapping[str, Any]
) -> dict[str, Any]:
    """Return torch's state dict with the counts and the engine's choices added."""
    own = {"format": FORMAT, "counts": dict(counts), "engine": {"name": engine, "choices": dict(choices)}}
    return {**state, KEY: own}


def check_state(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], counts: Mapping[str, int], engine: str
) -> Saved:
    """Return what is to be loaded into an optimizer of these groups, counts and engine; check all of it."""
    try:
        return _checked(state, groups, counts, engine)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this is no state of a GramGaussNewton, or a damaged one ({type(error).__name__}: {error}); nothing "
            "was loaded"
        ) from error


def _checked(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], counts: Mapping[str, int], engine: str
) -> Saved:
    own = state.get(KEY)
    if own is None:
        keys = sorted({key for group in state.get("param_groups", []) for key in group} - {"params"})
        raise ValueError(
            f"this state was saved by another optimizer, not by GramGaussNewton (its settings: "
            f"{', '.join(keys) or 'none'}): load it into an optimizer of that kind, or start this one without a "
            "state"
        )
    if own.get("format") != FORMAT:
        raise ValueError(
            f"this GramGaussNewton state has format {own.get('format')!r}, this version reads format {FORMAT}: load "
            "it with the version that saved it"
        )
    check_keys("the counts of a GramGaussNewton state", own["counts"], counts)
    saved = [dict(group) for group in state["param_groups"]]
    for group in saved:
        missing = [key for key in (*OF_GROUP, *OF_ALL) if key not in group]
        if missing:
            raise ValueError(f"this GramGaussNewton state has no {', '.join(missing)}: it is damaged")
        check_group(group)
    check_shared(saved)
    _check_parameters(state["state"], saved, groups)
    counted = {name: int(own["counts"][name]) for name in counts}
    choices = own["engine"]["choices"] if own["engine"]["name"] == engine else {}
    return {"state": state["state"], "param_groups": saved}, counted, choices


def _check_parameters(
    state: Mapping[int, Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Reject directions that do not fit the parameters."""
    sizes, own = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != own:
        raise ValueError(
            f"this GramGaussNewton state has parameter groups of {sizes} parameters, the optimizer of {own}: build "
            "it with the same groups, for the same network"
        )
    for group, mine in zip(saved, groups, strict=True):
        for number, param in zip(group["params"], mine["params"], strict=True):
            direction = state.get(number, {}).get(DIRECTION)
            if direction is not None and direction.shape != param.shape:
                raise ValueError(
                    f"this GramGaussNewton state has a direction of shape {list(direction.shape)} for parameter "
                    f"{number}, which has shape {list(param.shape)}: it belongs to another network"
                )
