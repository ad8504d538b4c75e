"""The configuration as data: every section and key there is, checked once more at the start.

Hydra lets ``+optimiser=ggn`` and ``+optimizer.lamda=9`` through, so its own check is not enough (H09).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gramgn.errors import ConfigError, InputError, first_line, nearest
from gramgn.records import override_key
from gramgn.tracking import TrackingConfig

OBJECT_SECTIONS = ("dataset", "model", "optimizer")
ENTRIES = (*OBJECT_SECTIONS, "trainer", "tracking", "seed", "name", "init_from", "resume")
# Sections that only set other keys while a configuration is composed, with their keys: none is recorded with a run.
SOURCES = {
    "scale": ("epochs", "batch_size", "image_size", "depth", "limit", "num_images"),
    "warm_start": ("dataset", "sweep"),
    "best_alpha": ("sweep",),
}
# Where data sets lie on this machine: recorded in the run folder's local.json only.
PATHS = ("raw", "prepared")
# Concerns a whole sweep: never in a run's run.json.
SWEEP_ENTRIES = ("on_failure",)
# Files in conf/ that follow from other choices, or from the machine.
DERIVED_GROUPS = ("dataset_optimizer", "scale", "local")


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the configuration fully resolved as plain Python types.

    Raises:
        ConfigError: If values are missing (all are named together, H17) or a reference cannot be resolved.
        InputError: What one of our own resolvers says, e.g. that no run is there to start from.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            examples = " ".join(f"{key}=<value>" for key in missing)
            raise ConfigError(f"these values must be given: {', '.join(missing)}. For example: {examples}")
        container = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        if (own := _said_by_resolver(error)) is not None:
            raise own from None
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"the configuration cannot be resolved: {where}{first_line(error)}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def run_entries(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a resolved configuration that belong to one run.

    Raises:
        ConfigError: A section that only sets other keys has an unknown key, or is no section.
    """
    for section, names in {**SOURCES, "paths": PATHS}.items():
        given = container.get(section, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section}={given!r} must be a mapping of {', '.join(names)}")
        check_keys(section, given, names)
    return {key: value for key, value in container.items() if key not in (*SOURCES, *SWEEP_ENTRIES)}


def check_doubled(overrides: Iterable[str]) -> None:
    """Check that no key is given twice, of which Hydra would silently use the last.

    Args:
        overrides: The command line; a deleted key (`~key`) may be given again.

    Raises:
        ConfigError: A key has two values.
    """
    given: dict[str, str] = {}
    for override in overrides:
        key = override_key(override)
        if not override.startswith("~") and given.setdefault(key, override) != override:
            raise ConfigError(
                f"{key} is given twice: {given[key]} and {override}. Give it once, in a sweep with all of its values"
            )


def choices_of(hydra: Any) -> dict[str, str]:
    """Return the option chosen in each group that a user chooses from; a group without one is absent."""
    chosen: Mapping[Any, Any] = hydra.runtime.choices
    return {
        str(group): str(option)
        for group, option in chosen.items()
        if option is not None and not str(group).startswith("hydra") and group not in DERIVED_GROUPS
    }


def _said_by_resolver(error: BaseException) -> InputError | None:
    """Return our own error inside OmegaConf's: a resolver's message is not about how it was written."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, InputError):
        inner = inner.__cause__ or inner.__context__
    return inner


def check_entries(config: Mapping[str, Any]) -> None:
    """Check the top level and the keys of the sections with a fixed set of them.

    Raises:
        ConfigError: For an unknown key, with the nearest valid one; a section that is no section; a bad seed.
    """
    check_keys("", config, (*ENTRIES, "paths"))
    _check_complete("", config, ENTRIES)
    for section in (*OBJECT_SECTIONS, "trainer", "tracking"):
        if not isinstance(config.get(section), Mapping):
            raise ConfigError(
                f"{section}={config.get(section)!r} must be one of the choices in conf/{section}"
            )
    for section in OBJECT_SECTIONS:
        if "_target_" not in config[section]:
            raise ConfigError(f"conf/{section}: the chosen file names no _target_, the class to build")
    from gramgn.training import TrainerConfig

    for section, schema in (("trainer", TrainerConfig), ("tracking", TrackingConfig)):
        names = [field.name for field in fields(schema)]
        check_keys(section, config[section], names)
        _check_complete(section, config[section], names)
    _check_finite("", config)
    seed = config["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r} must be a whole number from 0 to 2^63 - 1")
    for name in ("name", "init_from", "resume"):
        if config[name] is not None and not isinstance(config[name], str):
            raise ConfigError(
                f"{name}={config[name]!r} must be text (quote a number: {name}='\"1\"') or null"
            )


def _check_complete(section: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    prefix = f"{section}." if section else ""
    absent = [f"{prefix}{name}" for name in names if name not in given]
    if absent:
        raise ConfigError(f"{', '.join(absent)} must not be removed from the configuration")


def _check_finite(prefix: str, given: Mapping[str, Any]) -> None:
    """Refuse nan and inf anywhere: no setting means anything with them."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            _check_finite(f"{prefix}{key}.", value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}{key}={value} must be a finite number")


def check_keys(section: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Check the keys of a section, or of the top level if ``section`` is empty.

    Raises:
        ConfigError: For an unknown key, with the nearest valid one and all of them.
    """
    allowed = list(allowed)
    prefix = f"{section}." if section else ""
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"there is no '{prefix}{key}'{nearest(str(key), allowed)}. "
                f"{'Keys of ' + section if section else 'Keys'}: {', '.join(allowed)}"
            )
