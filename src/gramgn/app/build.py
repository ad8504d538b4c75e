"""Build objects from configuration sections, through Hydra's `_target_`.

A constructor's signature says which keys and types a section may have, so that a mistake is reported before any work.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Literal, Union, get_args, get_origin

import hydra.utils
from hydra.errors import InstantiationException

from gramgn.app.config import check_keys
from gramgn.app.paths import absolute
from gramgn.errors import ConfigError, InputError, first_line

PATHS = ("root", "prepared_root")
RESERVED = ("_target_", "_args_", "_recursive_", "_convert_", "_partial_")


def target_class(section: str, config: Mapping[str, Any]) -> Any:
    """Return the class or function that a section's `_target_` names.

    Raises:
        ConfigError: It cannot be imported.
    """
    logging.getLogger("hydra.utils").disabled = True  # it would write what the message says
    try:
        return hydra.utils.get_object(str(config["_target_"]))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{section}._target_={config['_target_']} cannot be imported ({error.__cause__ or error}). It must be the "
            "dotted name of a class or function in a module on Python's path (PYTHONPATH)"
        ) from error


def build(section: str, config: Mapping[str, Any], *arguments: Any) -> Any:
    """Build the object of a section.

    Args:
        section: Its name, for messages.
        config: The section, with `_target_`.
        *arguments: Passed to the constructor before the section's keys.

    Raises:
        ConfigError: The constructor does not take a key or a value.
    """
    target = target_class(section, config)
    _check_arguments(section, config, target, len(arguments))
    try:
        return hydra.utils.instantiate(dict(config), *arguments, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        # None, or an import that failed: a target inside the section that is not there.
        expected = (
            ValueError | TypeError | IndexError | RuntimeError | MemoryError | ImportError | AttributeError
        )
        if cause is None or isinstance(cause, expected | InstantiationException):
            raise ConfigError(
                f"{section} ({config['_target_']}): {first_line(cause or error, 400)}"
            ) from error
        raise (cause or error) from None


def build_dataset(config: Mapping[str, Any]) -> Any:
    """Build the data set of a `dataset` section; its relative paths are below the repository.

    Raises:
        ConfigError: The constructor does not take a key or a value.
    """
    for key in PATHS:
        if key in config and not isinstance(config[key], str):
            raise ConfigError(f"dataset.{key}={config[key]!r} must be the path of a folder or file")
    return build("dataset", {**config, **{key: str(absolute(config[key])) for key in PATHS if key in config}})


def _check_arguments(section: str, config: Mapping[str, Any], target: Any, num_positional: int) -> None:
    try:
        parameters = list(inspect.signature(target).parameters.values())[num_positional:]
    except (TypeError, ValueError):  # some classes written in C have no signature: they check for themselves
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    given = {key: value for key, value in config.items() if key not in RESERVED}
    check_keys(section, given, [parameter.name for parameter in parameters])
    annotations = _annotations(target.__init__ if inspect.isclass(target) else target)
    for key, value in given.items():
        annotation = annotations.get(key, Any)
        if not _fits(value, annotation):
            raise ConfigError(f"{section}.{key}={value!r} must be {_words(annotation)}")


def _annotations(function: Any) -> dict[str, Any]:
    """Return the annotations of a function, without those by names that exist for the type checker only."""
    found: dict[str, Any] = {}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    for key, annotation in getattr(function, "__annotations__", {}).items():
        with suppress(NameError, TypeError, AttributeError):
            found |= typing.get_type_hints(SimpleNamespace(__annotations__={key: annotation}), names)
    return found


WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a plain value can be meant for an annotation; an annotation that is not understood fits."""
    if isinstance(value, Mapping | list) or annotation is Any:
        return True
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(annotation))
    if origin is Literal:
        return value in get_args(annotation)
    if annotation in WORDS:
        given = {int, float} if annotation is float else {annotation}
        return type(value) in given
    # Tensors, paths, callables...: a number or a text is not a tensor, but a text may well be a path.
    return not isinstance(value, int | float | str) or "path" in str(annotation).lower()


def _words(annotation: Any) -> str:
    """Return what an annotation allows, in words for a command line."""
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    known = [WORDS[choice] for choice in choices if choice in WORDS]
    for choice in choices:
        if dataclasses.is_dataclass(choice):
            known.append(f"a mapping of {', '.join(field.name for field in dataclasses.fields(choice))}")
    return " or ".join(known) or f"a {annotation}"
