"""Command lines of the tools: words `key=value`, and the run folder that `run=` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gramgn.app.entry import report_errors
from gramgn.app.paths import absolute, set_repository, shown
from gramgn.errors import ConfigError, InputError, nearest
from gramgn.records import RunFolder, find_runs

NUM_NAMED = 3
REPEATABLE = ("images",)


def run_tool(
    task: Callable[[dict[str, list[str]]], int],
    words: Sequence[str],
    defaults: Mapping[str, str | None],
    *,
    root: Path,
    usage: str,
) -> int:
    """Run the command line of a tool and return its exit code: that of `task`, or 2 for a user's mistake.

    Args:
        task: Called with the values of each key.
        words: The command line without the program's name; `--help` prints `usage`.
        defaults: Every key with its default; None for a key that must be given.
        root: The repository.
        usage: A sentence, an empty line, a command line that works (shown in messages), and the rest.
    """
    if {"-h", "--help"} & set(words):
        print(usage)
        return 0
    set_repository(root)
    return report_errors(lambda: task(read_words(words, defaults, example=usage.splitlines()[2])))


def read_words(
    words: Sequence[str], defaults: Mapping[str, str | None], *, example: str
) -> dict[str, list[str]]:
    """Return the values of a command line of `key=value` words, by key; one value unless the key is repeatable.

    Raises:
        ConfigError: A word that is not `key=value`, an unknown key, an empty value, a key given twice or a
            missing one; the message names the nearest key and the example.
    """
    given: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in defaults:
            what = f"there is no '{key}'" if equals else f"'{word}' is not key=value"
            raise ConfigError(
                f"{what}{nearest(key.lstrip('+-'), defaults)}. Keys: {', '.join(defaults)}. Example: {example}"
            )
        if not value:
            raise ConfigError(f"'{word}': write {key}=<value>. Example: {example}")
        if key in given and key not in REPEATABLE:
            raise ConfigError(f"{key} is given twice: {key}={given[key][0]} and {word}")
        given.setdefault(key, []).append(value)
    missing = [key for key, default in defaults.items() if default is None and key not in given]
    if missing:
        needed = " ".join(f"{key}=<value>" for key in missing)
        raise ConfigError(f"{needed} must be given. Example: {example}")
    return {key: given.get(key, [default or ""]) for key, default in defaults.items()}


def open_run(given: str) -> RunFolder:
    """Return the run folder that `run=` names: below the current folder, or else below the repository.

    Args:
        given: As written on the command line; a file inside a run folder stands for that folder.

    Raises:
        InputError: There is no such folder, or it holds several runs (some are named).
    """
    here, there = Path(given).expanduser().absolute(), absolute(given)
    path = here if here.exists() or not there.exists() else there
    if path.is_file():
        path = next((parent for parent in path.parents if (parent / "run.json").is_file()), path)
    if not path.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"there is no run folder {path}{nearest(path.name, siblings)}; runs lie in outputs/runs and "
            "outputs/sweeps"
        )
    if not (path / "run.json").exists() and (runs := find_runs(path)):
        examples = ", ".join(f"run={shown(run.path)}" for run in runs[:NUM_NAMED])
        more = ", ..." if len(runs) > NUM_NAMED else ""
        raise InputError(f"{path} holds {len(runs)} runs; choose one of them: {examples}{more}")
    return RunFolder.open(path)
