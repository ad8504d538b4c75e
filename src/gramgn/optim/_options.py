"""What a user may write for the options that are objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gramgn.optim._acceptance import Acceptance
from gramgn.optim._adaptive import LevenbergMarquardt
from gramgn.optim._checks import check_choice, check_keys
from gramgn.optim._line_search import Armijo
from gramgn.optim.losses import LOSSES, Loss


def make_loss(name: Any) -> Loss:
    """Return the loss called ``name``.

    Raises:
        ValueError: There is none.
    """
    return LOSSES[check_choice("loss", name, tuple(LOSSES))]()


def make_acceptance(adaptive_damping: Any, line_search: Any) -> Acceptance | None:
    """Return the rule by which trial points are judged, or None where every step is taken as it is.

    Args:
        adaptive_damping: None, a ``LevenbergMarquardt`` or a mapping of its fields.
        line_search: None, ``"armijo"``, an ``Armijo`` or a mapping of its fields.

    Raises:
        ValueError: It is none of these, or both are given.
    """
    if line_search == "armijo":
        line_search = Armijo()
    damping = _built("adaptive_damping", adaptive_damping, LevenbergMarquardt)
    search = _built("line_search", line_search, Armijo)
    if damping is not None and search is not None:
        raise ValueError(
            "adaptive_damping and line_search both decide on the length of one step: take one of them, and set "
            "the other to None (null in a configuration)"
        )
    return damping or search


def _built(name: str, given: Any, kind: type[Any]) -> Any:
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        choices = "None, 'armijo'" if kind is Armijo else "None"
        raise ValueError(
            f"{name} must be {choices}, a gramgn.optim.{kind.__name__} or a mapping of its fields, got {given!r}"
        )
    check_keys(name, given, tuple(field.name for field in fields(kind)))
    return kind(**given)
