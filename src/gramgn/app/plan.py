"""The job to do, a new run or a stopped one to resume, and the paths of this machine, which are never recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramgn.app.config import check_entries
from gramgn.app.paths import absolute, repository
from gramgn.errors import ConfigError, InputError, first_line
from gramgn.records import RESUMABLE, RunFolder, flat, path_override, portable, with_added, write_atomic
from gramgn.scheduler import is_restarted, job_id

LOCAL_FILE = "local.json"
OUTPUT_FILE = "output.log"  # of the process of a sweep's job
# Entries of run.json that a resume reads.
STORED = ("id", "config", "choices", "overrides", "starts", "threads")
PATH_KEYS = ("dataset.root", "dataset.prepared_root", "init_from")


@dataclass(frozen=True)
class Job:
    """One run to do.

    Attributes:
        config: The whole configuration, resolved.
        choices: The option chosen in each group, e.g. `{"optimizer": "ggn"}`; labels in records and figures.
        overrides: The command line.
        folder: The run's folder.
        group: The sweep it belongs to; None for a single run.
        stored: The content of run.json of a run that is resumed; None for a new one.
        git: The state of the code when it was loaded; None looks it up when the run starts.
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
    allowed = ("resume", *RESUMABLE)
    if rejected := [key for key in keys if not any(f"{key}.".startswith(f"{name}.") for name in allowed)]:
        raise ConfigError(
            f"a resumed run keeps its configuration, so {', '.join(rejected)} cannot be given; only "
            f"{', '.join(RESUMABLE[:-1])} and {RESUMABLE[-1]} may change. Start a new run, or use "
            "init_from=<run folder>"
        )
    stored = RunFolder.open(folder).read_run(*STORED)
    stored["config"] = with_added(stored["config"])
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
    return Job(config, stored["choices"], stored["overrides"], folder, stored.get("group"), stored, git)


def restarted_run(place: Path, overrides: Sequence[str]) -> Path | None:
    """Return the folder of the run that this command began before the scheduler started its job again.

    Args:
        place: The folder that holds the runs.
        overrides: The command line.

    Returns:
        The newest run of this job with this command line; None if there is none, or the job was not restarted.
    """
    if not is_restarted():
        return None
    found: dict[str, Path] = {}
    for file in place.glob("*/run.json"):
        try:
            run = RunFolder(file.parent).read_run("starts")
        except InputError:  # a damaged record of another run
            continue
        if run["overrides"] == portable(list(overrides), repository()) and any(
            start.get("job") == job_id() for start in run["starts"]
        ):
            found[run["starts"][0].get("time_utc", "") + file.parent.name] = file.parent
    return found[max(found)] if found else None


def split_paths(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate the configuration as recorded (and uploaded) from the paths of this machine.

    Returns:
        The configuration with every path relative to the repository or cut to its last name, and the paths
        that this changed, by dotted key: `local.json` of the run folder keeps them, which is never uploaded.
    """
    recorded = {key: value for key, value in config.items() if key != "paths"}
    recorded["dataset"] = _with_default_paths(config["dataset"], config.get("paths") or {})
    recorded = portable(recorded, repository())
    before, after = flat(config), flat(recorded)
    local = {
        key: str(absolute(before[key]))
        for key in PATH_KEYS
        if before.get(key) is not None and absolute(before[key]) != absolute(after[key])
    }
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
        try:
            for key, path in json.loads(file.read_text()).items():
                section, _, name = key.rpartition(".")
                (config[section] if section else config)[name] = path
        except (ValueError, AttributeError, KeyError) as error:
            raise InputError(
                f"{file} is damaged ({first_line(error)}): it holds the paths {', '.join(PATH_KEYS)} of this machine. "
                "Fix it, or remove it if the data lies inside the repository"
            ) from error
    return config


def _with_default_paths(dataset: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `dataset` section as it would be without this machine's `paths.*` (`conf/local`)."""
    section = dict(dataset)
    for key, name in (("root", "raw"), ("prepared_root", "prepared")):
        base, value = paths.get(name), section.get(key)
        if isinstance(base, str) and isinstance(value, str):
            inner, outer = absolute(value), absolute(base)
            if inner.is_relative_to(outer):
                section[key] = (Path("data", name) / inner.relative_to(outer)).as_posix()
    return section
