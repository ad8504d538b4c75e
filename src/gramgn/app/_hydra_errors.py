"""Hydra's and OmegaConf's errors in the words of a person who mistyped something."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from gramgn.errors import nearest

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException)


def explain(error: Exception, conf: Path, arguments: Sequence[str]) -> str:
    """Return one message for an error of composing the configuration.

    Args:
        error: What Hydra raised.
        conf: The folder ``conf/``, for the choices there are.
        arguments: The command line, flags included.
    """
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(match.group(1), conf, arguments)
    if match := re.search(r"Could not find '([^']+)'", text):
        return _unknown_choice(match.group(1), conf)
    if "Multiple values for" in text:
        return f"{text.splitlines()[0]} (give each group once)"
    return "the command line or configuration cannot be used: " + " ".join(text.split())[:400]


def _unknown_key(key: str, conf: Path, arguments: Sequence[str]) -> str:
    group = key.split(".")[0]
    allowed = _keys_without(key, conf, arguments)
    message = f"there is no '{key}'{nearest(key, allowed)}."
    siblings = [name for name in allowed if name.split(".")[0] == group and "." in name]
    names = [name.removeprefix(f"{group}.") for name in siblings]
    top = [name for name in allowed if "." not in name]
    if allowed:
        message += f" Keys of {group}: {', '.join(names)}" if names else f" Keys: {', '.join(top)}"
    swept = [override for override in arguments if override.startswith(f"{group}=") and "," in override]
    if swept:
        message += (
            f"\n{swept[0]} sweeps over choices that do not all have this key; sweep them apart, for example:\n"
            f"  python train.py -m {group}={swept[0].split('=')[1].split(',')[0]} {key}=...\n"
            f"  python train.py -m {group}={swept[0].split('=')[1].split(',')[-1]}"
        )
    return message


def _keys_without(key: str, conf: Path, arguments: Sequence[str]) -> list[str]:
    """Return the dotted keys that the configuration has when the offending override is left out."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig

    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--config-dir", "-cd")
    given, words = options.parse_known_args(list(arguments))
    kept = [word.split(",")[0] for word in words if "=" in word and not word.lstrip("+~").startswith(key)]
    if given.config_dir:
        kept.append(f"hydra.searchpath=[file://{Path(given.config_dir).resolve()}]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            config = compose("train", overrides=kept)
    except COMPOSITION_ERRORS:  # something else is wrong as well: this message then lists no keys
        return []
    keys = []
    for name in config:
        section = config._get_node(name)
        inner = section.keys() if isinstance(section, DictConfig) and not section._is_none() else ()
        keys += [str(name), *(f"{name!s}.{key!s}" for key in inner if key != "_target_")]
    return keys


def _unknown_choice(choice: str, conf: Path) -> str:
    group, _, option = choice.rpartition("/")
    folder = conf / group
    allowed = sorted(str(path.relative_to(folder))[: -len(".yaml")] for path in folder.rglob("*.yaml"))
    if not group or not allowed:
        groups = sorted(path.name for path in conf.iterdir() if path.is_dir() and path.name != "hydra")
        return f"there is no '{choice}'{nearest(group or choice, groups)}. Groups: {', '.join(groups)}"
    return f"there is no {group}={option}{nearest(option, allowed)}. Choices: {', '.join(allowed)}"
