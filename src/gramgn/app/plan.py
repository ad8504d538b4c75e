"""What is to be run: a new run, or a stopped one that is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramgn.app.config import check_entries
from gramgn.app.paths import absolute, repository
from gramgn.errors import ConfigError, InputError, first_line
from gramgn.records import RESUMABLE, RunFolder, path_override, portable, write_atomic

LOCAL_FILE = "local.json"
OUTPUT_FILE = "output.log"  # of the process of a sweep's job
# Entries of run.json that a resume reads.
STORED = ("id", "config", "choices", "overrides", "starts", "threads")
PATH_KEYS = (("dataset", "root"), ("dataset", "prepared_root"), ("init_from",))


@dataclass(frozen=True)
class Job:
    """One run that is to be done.

    Attributes:
        config: The whole configuration, resolved.
        choices: The option chosen in each group, e.g. `{"optimizer": "ggn"}`; labels in records and figures.
        overrides: The command line.
        folder: The run's folder.
        group: The sweep it belongs to; None for a single run.
        stored: The content of run.json of a run that is resumed; None for a new one.
        git: The state of the code when it was loaded; None: look it up now.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: list[str]
    folder: Path
    group: str | None = None
    stored: dict[str, Any] | None = None
    git: dict[str, Any] | None = None


def run_folder(key: str, given: str) -> RunFolder:
    """Return the run folder that `resume=` or `init_from=` names.

    Args:
        key: The key, for messages.
        given: Its value; a relative path is below the repository.

    Raises:
        InputError: There is no such folder, it is not a run's, or it only lies inside one.
    """
    path = absolute(given)
    inside = next((parent for parent in path.parents if (parent / "run.json").is_file()), None)
    if inside is not None and not (path / "run.json").is_file():
        raise ConfigError(
            f"{key}={given} lies inside a run folder; give the folder itself: {path_override(key, inside)}"
        )
    return RunFolder.open(path)


def resumed_job(
    given: Mapping[str, Any], overrides: Sequence[str], folder: Path, git: dict[str, Any] | None = None
) -> Job:
    """Return the job that resumes the run in `folder`.

    Args:
        given: The configuration of this start; only what may change is taken from it.
        overrides: This start's command line.
        folder: The run's folder.
        git: See `Job`.

    Raises:
        ConfigError: The command line changes anything but epochs, device, threads and tracking, or the run
            diverged.
        InputError: The folder is not a run's, or its record is damaged.
    """
    keys = [override.lstrip("+~").split("=", 1)[0] for override in overrides]
    rejected = [key for key in keys if not _may_be_given(key)]
    if rejected:
        raise ConfigError(
            f"a resumed run keeps its configuration, so {', '.join(rejected)} cannot be given; only "
            f"{', '.join(RESUMABLE[:-1])} and {RESUMABLE[-1]} may change. Start a new run, or use "
            "init_from=<run folder>"
        )
    stored = RunFolder.open(folder).read_run(*STORED)
    check_entries(stored["config"])
    if stored["state"] == "diverged":
        why = (stored.get("error") or {}).get("message", "the reason is not recorded")
        raise ConfigError(
            f"the run in {folder} diverged ({why}) and would do so again; start a new one with other settings"
        )
    config = with_local_paths(stored["config"], folder)
    for key in RESUMABLE:
        section, _, name = key.partition(".")
        if name and key in keys:
            config[section] = {**config[section], name: given[section][name]}
        elif not name and any(each.split(".")[0] == section for each in keys):
            config[section] = given[section]
    return Job(
        config=config,
        choices=stored["choices"],
        overrides=stored["overrides"],
        folder=folder,
        group=stored.get("group"),
        stored=stored,
        git=git,
    )


def split_paths(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate the configuration as recorded (and uploaded) from the paths of this machine.

    Returns:
        The configuration with every path relative to the repository or cut to its last name, and the paths
        that this changed, by dotted key: `local.json` of the run folder keeps them, which is never uploaded.
    """
    recorded = {key: value for key, value in config.items() if key != "paths"}
    recorded["dataset"] = _with_default_paths(config["dataset"], config.get("paths") or {})
    recorded = portable(recorded, repository())
    local = {}
    for keys in PATH_KEYS:
        value = _get(config, keys)
        if value is not None and absolute(value) != absolute(_get(recorded, keys)):
            local[".".join(keys)] = str(absolute(value))
    return recorded, local


def write_local_paths(config: Mapping[str, Any], folder: Path) -> None:
    """Keep the paths of this machine in the run folder, if there are any."""
    _, local = split_paths(config)
    if local:
        write_atomic(folder / LOCAL_FILE, json.dumps(local, indent=2) + "\n")


def with_local_paths(recorded: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recorded configuration with this machine's paths put back.

    Raises:
        InputError: `local.json` is damaged.
    """
    config = {key: dict(value) if isinstance(value, Mapping) else value for key, value in recorded.items()}
    file = folder / LOCAL_FILE
    if file.is_file():
        known = {".".join(keys): keys for keys in PATH_KEYS}
        try:
            for dotted, path in json.loads(file.read_text()).items():
                *sections, name = known[dotted]
                (config[sections[0]] if sections else config)[name] = path
        except (ValueError, AttributeError, KeyError) as error:
            raise InputError(
                f"{file} is damaged ({first_line(error)}): it holds the paths {', '.join(known)} of this machine. "
                "Mend it, or remove it if the data lies inside the repository"
            ) from error
    return config


def _may_be_given(key: str) -> bool:
    """Return whether a resumed run takes a key of its command line."""
    return any(key == name or key.startswith(f"{name}.") for name in ("resume", *RESUMABLE))


def _with_default_paths(dataset: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `dataset` section as it would be without this machine's `paths.*` (`conf/local`)."""
    section = dict(dataset)
    for key, name in (("root", "raw"), ("prepared_root", "prepared")):
        base, value = paths.get(name), section.get(key)
        if not isinstance(base, str) or not isinstance(value, str):
            continue
        if absolute(value).is_relative_to(absolute(base)):
            section[key] = (Path("data", name) / absolute(value).relative_to(absolute(base))).as_posix()
    return section


def _get(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
