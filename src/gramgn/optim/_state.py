"""The optimizer's state as plain values, and the refusal of another optimizer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "gram_gauss_newton"
FORMAT = 1
# Keys of a parameter group by which the usual optimizers give themselves away.
TELLTALES = {"nesterov": "SGD", "betas": "Adam or AdamW", "rho": "Adadelta", "momentum": "RMSprop or SGD"}


def pack_state(state: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Return torch's state dict with the counts beside it."""
    return {**state, KEY: {"format": FORMAT, "counts": dict(counts)}}


def check_state(state: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts in ``state``.

    Args:
        state: What is to be loaded.
        counts: The counts of the optimizer it is loaded into.

    Raises:
        ValueError: ``state`` is not that of a ``GramGaussNewton``, or of an unknown format.
    """
    own = state.get(KEY)
    if own is None:
        keys = sorted(key for group in state.get("param_groups", []) for key in group if key != "params")
        owner = next((name for key, name in TELLTALES.items() if key in keys), "another optimizer")
        raise ValueError(
            f"this state was saved by {owner}, not by GramGaussNewton (its settings: "
            f"{', '.join(keys) or 'none'}): load it into an optimizer of its own kind, or start this one "
            "without a state"
        )
    if own.get("format") != FORMAT or set(own["counts"]) != set(counts):
        raise ValueError(
            f"this GramGaussNewton state has format {own.get('format')!r}, this version reads format "
            f"{FORMAT}: load it with the version that saved it"
        )
    return {name: int(own["counts"][name]) for name in counts}
