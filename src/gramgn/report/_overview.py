"""The head of the page: what was run, on what, and what a reader must know before believing a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ._entries import Entry
from ._settings import plain


@dataclass(frozen=True)
class RunSet:
    """Runs on one data set at one scale on one device.

    Attributes:
        kind: ``"SYNTHETIC"`` or ``"real"``.
        dataset: Name of the data set.
        pixels: Image sizes that occur.
        images: Numbers of images that occur.
        scale: Choice of the trainer.
        device: Name of the device.
        threads: Numbers of CPU threads that occur.
        num_runs: Number of runs.
        states: How many runs ended in which state.
    """

    kind: str
    dataset: str
    pixels: str
    images: str
    scale: str
    device: str
    threads: str
    num_runs: int
    states: str


@dataclass(frozen=True)
class Problem:
    """A run that did not end well, or is not there.

    Attributes:
        path: Its folder.
        state: What became of it.
        reason: Why, as far as it is recorded.
        anchor: Its place in the page; empty if it has none.
    """

    path: str
    state: str
    reason: str
    anchor: str = ""

    @property
    def mark(self) -> str:
        """Style class of the state."""
        return self.state.split()[0]


def run_sets(entries: Iterable[Entry]) -> list[RunSet]:
    """Return what was run, one line for each data set, scale and device, in alphabetical order.

    Args:
        entries: All runs of the page.
    """
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_set_key(entry), []).append(entry)
    return [_run_set(key, groups[key]) for key in sorted(groups)]


def problems(
    entries: Iterable[Entry], unreadable: Mapping[str, str], absent: Iterable[Problem] = ()
) -> list[Problem]:
    """Return the runs that did not end well, ordered by path.

    Args:
        entries: All runs of the page.
        unreadable: Folders whose ``run.json`` cannot be read, with the reason.
        absent: Jobs of sweeps without a run folder.
    """
    found = [*absent, *(Problem(path, "unreadable", reason) for path, reason in unreadable.items())]
    for entry in entries:
        if entry.reason is not None:
            found.append(Problem(entry.path, entry.state, entry.reason, entry.anchor))
        elif entry.notes:
            found.append(Problem(entry.path, "done, but damaged", " ".join(entry.notes), entry.anchor))
    return sorted(found, key=lambda problem: problem.path)


def synthetic_warning(entries: Iterable[Entry]) -> str:
    """Return a sentence on stand-in data; empty if all data is real.

    Args:
        entries: All runs of the page.
    """
    kinds = [(entry.get("dataset", "kind"), plain(entry.get("dataset", "name"))) for entry in entries]
    stand_ins = sorted({name for kind, name in kinds if kind == "synthetic"})
    if not stand_ins:
        return ""
    others = sorted({name for kind, name in kinds if kind == "real"})
    sentence = (
        f"{', '.join(stand_ins)}: made by a program, no real images. Numbers from it show how the methods behave "
        "beside each other; they are not the paper's."
    )
    return sentence + (f" Real images: {', '.join(others)}." if others else "")


def code_warning(entries: Iterable[Entry]) -> str:
    """Return a sentence where runs come from several commits or from changed files; else empty.

    Args:
        entries: All runs of the page.
    """
    entries = list(entries)
    commits = {str(commit) for entry in entries if (commit := entry.get("git", "commit"))}
    dirty = sum(entry.get("git", "dirty") is True for entry in entries)
    unknown = sum(entry.get("git", "commit") is None for entry in entries)
    parts = []
    if len(commits) > 1:
        parts.append(f"The runs come from {len(commits)} commits.")
    if dirty:
        parts.append(f"In {dirty} of them files differed from the commit.")
    if unknown:
        parts.append(f"Of {unknown} the commit is not known.")
    return " ".join([*parts, "Each run's own is in its details."]) if parts else ""


def _set_key(entry: Entry) -> tuple[str, ...]:
    kind = entry.get("dataset", "kind")
    shown = "SYNTHETIC" if kind == "synthetic" else kind
    found = [
        shown,
        entry.get("dataset", "name"),
        entry.get("config", "trainer", "scale"),
        entry.get("device", "name"),
    ]
    return tuple("unknown" if value is None else plain(value) for value in found)


def _run_set(key: tuple[str, ...], runs: list[Entry]) -> RunSet:
    kind, dataset, scale, device = key
    states = Counter(run.state for run in runs)
    return RunSet(
        kind=kind,
        dataset=dataset,
        pixels=_values(runs, lambda run: run.get("dataset", "image_size")),
        images=_values(runs, lambda run: run.get("dataset", "summary", "used")),
        scale=scale,
        device=device,
        threads=_values(runs, lambda run: run.get("threads")),
        num_runs=len(runs),
        states=", ".join(f"{count} {state}" for state, count in sorted(states.items())),
    )


def _values(runs: list[Entry], value: Callable[[Entry], Any]) -> str:
    found = {value(run) for run in runs if isinstance(value(run), int)}
    return ", ".join(str(number) for number in sorted(found)) or "unknown"
