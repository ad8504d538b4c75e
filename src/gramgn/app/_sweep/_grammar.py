"""Hydra's grammar of overrides: what is fixed, what is swept, and the jobs of a grid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.types import HydraContext

from gramgn.errors import ConfigError


def parse(context: HydraContext, overrides: Sequence[str]) -> list[Override]:
    """Return overrides as Hydra reads them."""
    return list(OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(overrides)))


def text_of(override: Override) -> str:
    """Return an override that is no sweep in the form that a value of a sweep has, e.g. ``lr=0.001`` for 1e-3."""
    if override.is_delete():
        return str(override.input_line)
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def grid(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the product of all axes as jobs; of two overrides of one key the later counts.

    Raises:
        ConfigError: For a range of real numbers, which has no values to take in turn, or for an axis without any.
    """
    axes: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            axes[key] = [text_of(override)]
        elif override.is_discrete_sweep():
            axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not axes[key]:
                raise ConfigError(
                    f"{override.input_line} has no values, so that nothing would be run{_why(override)}"
                )
        else:
            raise ConfigError(
                f"{override.input_line} names no values: give some, e.g. {key}=0.1,1,10, "
                "or search with sweep=optuna_alpha"
            )
    return list(itertools.product(*axes.values()))


def _why(override: Override) -> str:
    value: object = override.value()
    if isinstance(value, Glob):
        return ": glob() chooses among the files of a group in conf/, such as optimizer, by their names"
    if isinstance(value, RangeSweep):
        return ": range(start, stop, step) ends before stop"
    return ""
