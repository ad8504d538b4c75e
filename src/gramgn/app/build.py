"""Configuration sections to objects, through `_target_` as Hydra users know it.

A constructor's signature says which keys and types a section may have, so that a mistake is reported before any work.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from gramgn.app.paths import absolute
from gramgn.errors import ConfigError, InputError, first_line, nearest

PATHS = ("root", "prepared_root")
RESERVED = ("_target_", "_args_", "_recursive_", "_convert_", "_partial_")


def target_class(section: str, config: Mapping[str, Any]) -> Any:
    """Return the class or function that a section's `_target_` names.

    Raises:
        ConfigError: It cannot be imported.
    """
    target = config["_target_"]
    try:
        return _locate(str(target))
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{section}._target_={target} cannot be imported ({error}). It must be the dotted name of a class or "
            "function in a module on Python's path (PYTHONPATH)"
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
    import hydra.utils
    from hydra.errors import InstantiationException

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


def _locate(dotted: str) -> Any:
    """Import the longest part of a dotted name that is a module and look the rest up in it."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only a missing module means: try a shorter name. A module that fails inside is reported.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise ImportError(f"there is no module {parts[0]!r}")


def _check_arguments(section: str, config: Mapping[str, Any], target: Any, num_positional: int) -> None:
    try:
        parameters = list(inspect.signature(target).parameters.values())[num_positional:]
    except (TypeError, ValueError):  # some classes written in C have no signature: they check for themselves
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    allowed = [parameter.name for parameter in parameters]
    for key, value in config.items():
        if key in RESERVED:
            continue
        if key not in allowed:
            raise ConfigError(
                f"there is no '{section}.{key}'{nearest(key, allowed)}. "
                f"Keys of {config['_target_']}: {', '.join(allowed)}"
            )
        annotation = _annotations(target).get(key, Any)
        if not _fits(value, annotation):
            raise ConfigError(f"{section}.{key}={value!r} must be {_words(annotation)}")


def _annotations(target: Any) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names that exist for the type checker only
        return {}


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a plain value can be meant for an annotation; an annotation that is not understood fits."""
    if isinstance(value, Mapping | list) or annotation is Any:
        return True
    origin = get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        return any(_fits(value, choice) for choice in get_args(annotation))
    if origin is Literal:
        return value in get_args(annotation)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in (bool, str):
        return isinstance(value, annotation)
    if annotation is type(None):
        return value is None
    # Tensors, paths, callables...: a number or a text is not a tensor, but a text may well be a path.
    return not isinstance(value, int | float | str) or "path" in str(annotation).lower()


WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}


def _words(annotation: Any) -> str:
    """Return what an annotation allows, in words for a command line."""
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    known = [WORDS[choice] for choice in choices if choice in WORDS]
    objects = [choice for choice in choices if dataclasses.is_dataclass(choice)]
    known += [
        f"a mapping of {', '.join(field.name for field in dataclasses.fields(each))}" for each in objects
    ]
    return " or ".join(known) or f"a {annotation}"
