"""Hydra's and OmegaConf's errors, explained to the person who mistyped something."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from gramgn.app.config import check_doubled
from gramgn.errors import ConfigError, nearest
from gramgn.records import override_key, path_override

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException)
# Names that other packages use for keys of this one.
NEEDED_GROUPS = ("dataset", "model", "optimizer", "trainer", "schedule", "augment", "tracking")
HYDRA_KEYS = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.launcher.n_jobs", "hydra.launcher.threads_per_job"),
    *("hydra.launcher.gpus", "hydra.sweeper.params", "hydra.sweeper.points", "hydra.sweeper.extend"),
)
# What has an effect here, with everything below it.
WITH_EFFECT = (
    *("hydra.run.dir", "hydra.sweep", "hydra.launcher", "hydra.sweeper", "hydra.job.env_set"),
    *("hydra.mode", "hydra.searchpath", "hydra.callbacks", "hydra.help"),
)
OF_SWEEPS = ("hydra.sweep", "hydra.launcher", "hydra.sweeper")
WITH_VALUE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p")
SYNONYMS = {
    "learning_rate": "lr",
    "lambda": "lam",
    "damping": "alpha",
    "wd": "weight_decay",
    "bs": "batch_size",
    "num_epochs": "epochs",
}


def explain(error: Exception, conf: Path, arguments: Sequence[str], config_name: str) -> str:
    """Return one message for an error that Hydra raised while it composed the configuration.

    Args:
        error: The error.
        conf: The folder `conf/`, for its choices.
        arguments: The command line, flags included.
        config_name: The top-level file in `conf/`.
    """
    text = str(error)
    if removed := removed_group(arguments, conf):
        return removed
    if unreadable := _unreadable(error, config_name):
        return unreadable
    if match := re.search(r"Could not override '([^']+)'", text):
        try:
            check_doubled(word for word in arguments if "=" in word and not word.startswith(("-", "hydra/")))
        except ConfigError as doubled:
            return str(doubled)
        # Of a mapping, 'optimizer={alhpa:1}', Hydra names the section, OmegaConf the key.
        inner = getattr(error.__cause__, "full_key", None)
        key = inner if isinstance(inner, str) and inner.startswith(f"{match.group(1)}.") else match.group(1)
        return _unknown_key(key, conf, arguments, config_name)
    if "'hydra/sweeper/optuna'" in text:
        return "a search by Optuna needs the extra optuna: python -m pip install '.[optuna]'"
    if match := re.search(r"Could not find '([^']+)'", text):
        return _unknown_choice(match.group(1), [conf, *split_config_dir(arguments)[0]])
    if "Multiple values for" in text:
        return f"{text.splitlines()[0]} (give each group once)"
    return "the command line or configuration cannot be used: " + " ".join(text.split())[:400]


def _unreadable(error: Exception, config_name: str) -> str:
    """Return a message for a value that is several to Hydra, or a text that it cannot read without quotes; else ""."""
    several = re.search(r"Ambiguous value for argument '(\S+)'", str(error))
    word = several.group(1) if several else str(getattr(error, "override", None) or "")
    key, _, value = word.partition("=")
    # A list, a mapping or a call was meant to be read.
    is_text = bool(value) and not re.match(r"[\[{('\"]|\w+\(", value)
    quoted = path_override(key, value)
    if several:
        sweep = "add -m to sweep over them" if config_name == "train" else "give one"
        text = "" if key in NEEDED_GROUPS else f"; if it is one text, write {quoted}"
        return f"{word} has several values: {sweep}{text}"
    return f"{word}: this text needs quotes: {quoted}" if is_text else ""


def check_hydra_keys(words: Iterable[str], *, is_sweep: bool | None = None) -> None:
    """Check that every override of Hydra's own section has an effect.

    Args:
        words: Overrides, or a whole command line.
        is_sweep: Whether they are those of a sweep; None leaves that open.

    Raises:
        ConfigError: One of them would be ignored.
    """
    for word in words:
        key = override_key(word)
        if is_sweep is False and key == "hydra/launcher":
            raise ConfigError(f"{word} concerns a sweep, and this is a single run: add -m, or leave it out")
        if not key.startswith("hydra.") or "=" not in word:
            continue
        if not any(f"{key}.".startswith(f"{name}.") for name in WITH_EFFECT):
            raise ConfigError(
                f"{word} has no effect here. Keys of Hydra that matter: {', '.join(HYDRA_KEYS)}"
            )
        of_sweep = any(f"{key}.".startswith(f"{name}.") for name in OF_SWEEPS)
        if is_sweep is False and of_sweep:
            raise ConfigError(
                f"{word} concerns a sweep, and this is a single run: add -m or sweep=, or leave it out"
            )
        if is_sweep and key == "hydra.run.dir":
            raise ConfigError(
                f"{word} is the folder of a single run; a sweep's is outputs/sweeps/<name> with name=, or "
                "hydra.sweep.dir"
            )


def flags_first(words: Sequence[str]) -> list[str]:
    """Return a command line with its overrides last: Hydra reads no override after a flag that follows others."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_override = not word.startswith("-") and "=" in word and before not in WITH_VALUE
        (overrides if is_override else flags).append(word)
    return [*flags, *overrides]


def from_hydra(error: BaseException) -> bool:
    """Return whether Hydra, OmegaConf or a sweeper's search raised an error, so that it is about the command line."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__", "")).split(".")[0] for frame, _ in frames]
    # Below them, the standard library may have raised it: a file of the configuration that is not text, or endless.
    modules = [module for module in modules if module not in sys.stdlib_module_names]
    return bool(modules) and modules[-1] in ("hydra", "omegaconf", "antlr4", "yaml", "optuna")


def removed_group(arguments: Sequence[str], conf: Path) -> str:
    """Return a message for a group without which nothing can be composed (`~optimizer`, `optimizer=null`), or ""."""
    for word in arguments:
        key, _, value = word.partition("=")
        group = key.lstrip("~")
        options = (
            sorted(path.stem for path in (conf / group).glob("*.yaml")) if group in NEEDED_GROUPS else []
        )
        if options and (key.startswith("~") or value == "null"):
            return f"{word}: {group} must not be removed. Choices: {', '.join(options)}"
    return ""


def _unknown_key(key: str, conf: Path, arguments: Sequence[str], config_name: str) -> str:
    group = key.split(".")[0]
    if group == "hydra":
        known = [*HYDRA_KEYS]
        if "hydra/launcher=slurm" in arguments:
            of_slurm = (conf / "hydra" / "launcher" / "slurm.yaml").read_text()
            known = [f"hydra.launcher.{name}" for name in re.findall(r"^([a-z]\w+):", of_slurm, re.MULTILINE)]
        names = [name.removeprefix("hydra.") for name in known]
        return (
            f"there is no '{key}'{nearest(key.removeprefix('hydra.'), names)}. Keys that matter here: "
            f"{', '.join(known)}; "
            "python train.py --cfg hydra shows all"
        )
    if "/" in key and (conf / key).is_dir():
        top, _, rest = key.partition("/")
        options = [word.split("=", 1)[1] for word in arguments if word.lstrip("+").startswith(f"{key}=")]
        return f"'{key}' is no group; did you mean {top}={rest}/{options[0] if options else '<option>'}?"
    # Some of the choices of a swept group may have the key.
    swept = [word for word in arguments if word.startswith(f"{group}=") and "," in word and key != group]
    if swept:
        return _swept_apart(key, swept[0], arguments)
    allowed = _keys_without(key, conf, arguments, config_name)
    message = f"there is no '{key}'{_nearest_key(key, allowed)}."
    names = [name.removeprefix(f"{group}.") for name in allowed if name.startswith(f"{group}.")]
    if names:
        return f"{message} Keys of {group}: {', '.join(names)}"
    return f"{message} Keys: {', '.join(name for name in allowed if '.' not in name)}" if allowed else message


def _nearest_key(key: str, allowed: Sequence[str]) -> str:
    """Return a hint at the key that was meant: the same name in a section, a synonym, or a similar name."""
    section, _, name = key.rpartition(".")
    name = SYNONYMS.get(name, name)
    same = [each for each in allowed if each.rpartition(".")[2] == name and each.startswith(section)]
    return f" (did you mean '{same[0]}'?)" if same else nearest(key, allowed)


def _swept_apart(key: str, swept: str, arguments: Sequence[str]) -> str:
    """Explain that some choices of a sweep lack a key, and show two sweeps that work."""
    group, choices = swept.split("=", 1)
    first, *others = choices.split(",")
    with_key = next((word for word in arguments if word.lstrip("+").startswith(f"{key}=")), f"{key}=...")
    rest = [word for word in arguments if word not in (swept, with_key, "-m", "--multirun")]
    if not any(word.startswith("name=") for word in rest):
        rest.append("name=<one name for both>")
    common = " ".join(rest)
    return (
        f"not every choice of {swept} has the key '{key}'. Sweep apart, under one name, for example:\n"
        f"  python train.py -m {group}={first} {with_key} {common}\n"
        f"  python train.py -m {group}={','.join(others)} {common}"
    )


def _keys_without(key: str, conf: Path, arguments: Sequence[str], config_name: str) -> list[str]:
    """Return the dotted keys that the configuration has when the offending override is left out."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig

    kept = [word.split(",")[0] for word in arguments if "=" in word and not word.startswith("-")]
    # Also without the section of the key, given in braces: optimizer={alhpa:1}.
    kept = [
        word
        for word in kept
        if not word.lstrip("+~").startswith(key)
        and not ("={" in word and key.startswith(f"{override_key(word)}."))
    ]
    kept += search_path(split_config_dir(arguments)[0])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            config = compose(config_name, overrides=kept)
    except COMPOSITION_ERRORS:  # something else is wrong as well: the message lists no keys
        return []
    keys = []
    for name in config:
        section = config._get_node(name)
        inner = section.keys() if isinstance(section, DictConfig) and not section._is_none() else ()
        keys += [str(name), *(f"{name!s}.{key!s}" for key in inner if key != "_target_")]
    return keys


def search_path(folders: Sequence[Path]) -> list[str]:
    """Return the overrides that make Hydra's compose search folders, which has no `--config-dir`."""
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []


def _unknown_choice(choice: str, folders: Sequence[Path]) -> str:
    top = choice.partition("/")[0]
    # An option may lie in a folder of its group (experiment=fig1/...); Hydra's own groups have two names.
    group, _, option = choice.rpartition("/") if top == "hydra" else choice.partition("/")
    allowed = sorted(
        path.relative_to(folder / group).with_suffix("").as_posix()
        for folder in folders
        for path in (folder / group).rglob("*.yaml")
    )
    if not group or not allowed:
        groups = sorted(path.name for path in folders[0].iterdir() if path.is_dir() and path.name != "hydra")
        return f"there is no '{choice}'{nearest(group or choice, groups)}. Groups: {', '.join(groups)}"
    return f"there is no {group}={option}{nearest(option, allowed)}. Choices: {', '.join(allowed)}"


def split_config_dir(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the folder that `--config-dir` gives, if there is one, and the other words of a command line."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--config-dir", "-cd")
    given, others = options.parse_known_args(list(arguments))
    return [Path(given.config_dir).resolve()] if given.config_dir else [], others
