"""What goes to the processes of a sweep and comes back: plain data, light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

OUTPUT_FILE = "output.log"


class JobFailedError(Exception):
    """A job failed, before it has a folder or so that the sweep ends (``on_failure=stop``, a search without trials)."""


@dataclass(frozen=True)
class Cell:
    """One job of a sweep.

    Attributes:
        folder: Its run folder, absolute.
        overrides: Its command line.
        config: Its whole configuration, resolved.
        choices: The option chosen in each group.
        group: Name of the sweep.
        environment: Variables that the configuration (``hydra.job.env_set``) asks to set.
    """

    folder: Path
    overrides: tuple[str, ...]
    config: dict[str, Any]
    choices: dict[str, str]
    group: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of its folder, which identifies it within the sweep."""
        return self.folder.name


@dataclass(frozen=True)
class Planned:
    """What is to be done about a cell.

    Attributes:
        cell: The cell.
        action: ``new``; ``resume`` (there is a run.json); ``anew`` (there is one that holds nothing worth keeping);
            ``keep`` (done or diverged); ``refuse``.
        config_hash: Of its configuration.
        reason: Why it is refused.
        record: The run.json there is.
    """

    cell: Cell
    action: Literal["new", "resume", "anew", "keep", "refuse"]
    config_hash: str
    reason: str = ""
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Task:
    """What a child process does.

    Attributes:
        kind: ``check`` (build every job without data) or ``run`` (do the one job).
        jobs: Cells with their action.
        root: The repository.
        log: File that its output goes to; None: nowhere.
        environment: Variables to set before anything is done.
        threads: CPU threads of a job that does not ask for a number itself; None: torch's choice.
        git: The state of the code when the sweep was started, which is the code that runs.
    """

    kind: Literal["check", "run"]
    jobs: tuple[tuple[Cell, str], ...]
    root: Path
    log: Path | None
    environment: dict[str, str]
    threads: int | None
    git: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """How a child process ended.

    Attributes:
        number: The number that it was started under.
        result: What it said; None if it ended without a word.
        status: Its exit code; the negative number of the signal that killed it.
    """

    number: int
    result: dict[str, Any] | None
    status: int
