"""The configuration as plain data: every section and key, checked once more before a run starts.

Hydra lets `+optimiser=ggn` and `+optimizer.lamda=9` through, so its own check is not enough (H09).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gramgn.app.paths import repository
from gramgn.errors import ConfigError, InputError, checked_choice, first_line, is_whole, nearest
from gramgn.records import override_key
from gramgn.tracking import TrackingConfig

OBJECT_SECTIONS = ("dataset", "model", "optimizer")
ENTRIES = (
    *OBJECT_SECTIONS,
    "trainer",
    "schedule",
    "augment",
    "tracking",
    "seed",
    "name",
    "init_from",
    "resume",
)
# Sections that only set keys of other sections while a configuration is composed; none is recorded with a run.
SOURCES = {
    "scale": ("epochs", "batch_size", "image_size", "depth", "limit", "num_images"),
    "warm_start": ("dataset", "sweep"),
    "best_alpha": ("sweep",),
}
# Where data sets lie on this machine: kept in the run folder's local.json only.
PATHS = ("raw", "prepared")
# Concerns a whole sweep, so that no run records it.
SWEEP_ENTRIES = ("on_failure",)
ON_FAILURE = ("continue", "stop")
# Files in conf/ that follow from other choices, or from the machine.
DERIVED_GROUPS = ("dataset_optimizer", "experiment_optimizer", "scale", "local")


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the configuration fully resolved as plain Python types.

    Raises:
        ConfigError: Values are missing (all are named together, H17) or a reference cannot be resolved.
        InputError: A resolver of this project failed, e.g. because there is no run to start from.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            examples = " ".join(f"{key}=<value>" for key in missing)
            raise ConfigError(f"these values must be given: {', '.join(missing)}. For example: {examples}")
        container = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        if (own := _raised_by_resolver(error)) is not None:
            raise own from None
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"the configuration cannot be resolved: {where}{first_line(error)}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def run_entries(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a resolved configuration that belong to one run.

    Raises:
        ConfigError: A section that only sets other keys has an unknown key, or is not a mapping; or `on_failure` has
            an unknown value.
    """
    for section, names in {**SOURCES, "paths": PATHS}.items():
        given = container.get(section, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section}={given!r} must be a mapping of {', '.join(names)}")
        check_keys(section, given, names)
    checked_choice("on_failure", container.get("on_failure", "continue"), ON_FAILURE)
    return {key: value for key, value in container.items() if key not in (*SOURCES, *SWEEP_ENTRIES)}


def check_entries(config: Mapping[str, Any]) -> None:
    """Check the entries of a run: the top level, and the sections with a fixed set of keys.

    Raises:
        ConfigError: An unknown key (the nearest valid one is named), a missing one, or a bad value.
    """
    from gramgn.training import AugmentConfig, ScheduleConfig, TrainerConfig

    schemas: dict[str, Any] = {"trainer": TrainerConfig, "schedule": ScheduleConfig}
    schemas |= {"augment": AugmentConfig, "tracking": TrackingConfig}

    check_keys("", config, (*ENTRIES, "paths"))
    _check_complete("", config, ENTRIES)
    for section in (*OBJECT_SECTIONS, *schemas):
        if not isinstance(config[section], Mapping):
            raise ConfigError(f"{section}={config[section]!r} must be one of the choices in conf/{section}")
    for section in OBJECT_SECTIONS:
        if "_target_" not in config[section]:
            raise ConfigError(f"conf/{section}: the chosen file names no _target_, the class to build")
    for section, schema in schemas.items():
        names = [field.name for field in fields(schema)]
        check_keys(section, config[section], names)
        _check_complete(f"{section}.", config[section], names)
    _check_finite("", config)
    seed = config["seed"]
    if not is_whole(seed, 0, 2**63 - 1):
        raise ConfigError(f"seed={seed!r} must be a whole number from 0 to 2^63 - 1")
    for name in ("name", "init_from", "resume"):
        if config[name] is not None and not isinstance(config[name], str):
            raise ConfigError(
                f"{name}={config[name]!r} must be text (quote a number: {name}='\"1\"') or null"
            )


def check_keys(section: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Check the keys of a section, or of the top level if `section` is empty.

    Raises:
        ConfigError: An unknown key; the message has the nearest valid one and all of them.
    """
    allowed = list(allowed)
    prefix = f"{section}." if section else ""
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"there is no '{prefix}{key}'{nearest(str(key), allowed)}. "
                f"{'Keys of ' + section if section else 'Keys'}: {', '.join(allowed)}"
            )


def check_doubled(overrides: Iterable[str]) -> None:
    """Check that no key is given twice, of which Hydra would silently use the last.

    Args:
        overrides: The command line; a deleted key (`~key`) may be given again.

    Raises:
        ConfigError: A key has two values, or is given next to a value for the whole section that it belongs to.
    """
    given: dict[str, str] = {}
    for override in overrides:
        key = override_key(override)
        if not override.startswith("~") and given.setdefault(key, override) != override:
            raise ConfigError(
                f"{key} is given twice: {given[key]} and {override}. Give it once, in a sweep with all of its values"
            )
    for key, override in given.items():
        if override.count("{") == 1:
            inner = Counter(re.findall(r"[{,]\s*([\w.]+)\s*:", override))
            if twice := [name for name, number in inner.items() if number > 1]:
                raise ConfigError(f"{override} gives {', '.join(twice)} twice: give it once")
        section = key.rpartition(".")[0]
        is_whole_section = "." in section or given.get(section, "").partition("=")[2].startswith("{")
        if is_whole_section and section in given:
            value = given[section].partition("=")[2]
            hint = f", or give {section}.name={value}" if value.isalpha() else ""
            raise ConfigError(
                f"{given[section]} stands for the whole section that {override} belongs to: leave one of them out{hint}"
            )


def choices_of(hydra: Any) -> dict[str, str]:
    """Return the option chosen in each group that a user chooses from; a group without one is absent.

    Args:
        hydra: Hydra's own section of the configuration.

    Raises:
        ConfigError: An experiment was combined with an optimizer that its numbers are not meant for, or the scale of
            another trainer was chosen.
    """
    chosen: Mapping[Any, Any] = hydra.runtime.choices
    choices = {
        str(group): str(option)
        for group, option in chosen.items()
        if option is not None and not str(group).startswith("hydra") and group not in DERIVED_GROUPS
    }
    _check_experiment(choices.get("experiment"), choices.get("optimizer"))
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    if any(override_key(word) == "trainer.scale" for word in words):
        known = sorted(path.stem for path in (repository() / "conf" / "trainer").glob("*.yaml"))
        raise ConfigError(
            f"trainer.scale is the name of the chosen trainer, for records: give trainer=<{' | '.join(known)}>, or "
            "single sizes such as trainer.epochs=5"
        )
    scale, trainer = chosen.get("scale"), choices.get("trainer")
    if scale not in (None, trainer):  # records would name a scale that the run does not have
        raise ConfigError(
            f"scale={scale} follows from the trainer, which is {trainer}: give trainer={scale}, or single sizes such "
            "as trainer.epochs=5"
        )
    return choices


def _check_experiment(experiment: str | None, optimizer: str | None) -> None:
    """Check that the `optimizer:` section of an experiment is merged into a section of the same class.

    SGD has no lambda; worse, GGN would silently take SGD's learning rate and momentum.
    """
    folder = repository() / "conf" / "experiment"
    numbers_for = {
        path.relative_to(folder).with_suffix("").as_posix(): _optimizer_of(path)
        for path in sorted(folder.rglob("*.yaml"))
    }
    own = numbers_for.get(experiment or "")
    if own is None or optimizer is None or _target(optimizer) in (None, _target(own)):
        return
    fitting = [name for name, option in numbers_for.items() if option == optimizer]
    choose = f"Choose an experiment of {optimizer} ({', '.join(fitting)}), or give" if fitting else "Give"
    raise ConfigError(
        f"experiment={experiment} states the numbers of optimizer={own}, which do not apply to optimizer={optimizer}. "
        f"{choose} dataset=, model= and optimizer={optimizer} without experiment="
    )


def _optimizer_of(path: Path) -> str | None:
    """Return the optimizer that an experiment's file states numbers for, None if it states none."""
    content: Any = OmegaConf.load(path)
    chosen = [entry.get("override /optimizer") for entry in content.get("defaults", []) if entry != "_self_"]
    return next(filter(None, chosen), None) if "optimizer" in content else None


def _target(optimizer: str) -> str | None:
    """Return the class of a choice in `conf/optimizer`, its own or that of the file it extends; None if unknown."""
    path = repository() / "conf" / "optimizer" / f"{optimizer}.yaml"
    content: Any = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
    extended = [entry for entry in content.get("defaults", []) if entry != "_self_"]
    return content.get("_target_") or next((_target(entry) for entry in extended), None)


def _check_complete(prefix: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    absent = [f"{prefix}{name}" for name in names if name not in given]
    if absent:
        raise ConfigError(f"{', '.join(absent)} must not be removed from the configuration")


def _check_finite(prefix: str, given: Mapping[str, Any]) -> None:
    """Reject nan and inf anywhere: no setting means anything with them."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            _check_finite(f"{prefix}{key}.", value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}{key}={value} must be a finite number")


def _raised_by_resolver(error: BaseException) -> InputError | None:
    """Return our own error inside OmegaConf's: what a resolver reports is not about how it was written."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, InputError):
        inner = inner.__cause__ or inner.__context__
    return inner
