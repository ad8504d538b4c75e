"""How far the paper's chain is, from the records of its sweeps alone, and how long the rest may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramgn.app._paper import Chain, Step
from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import SweepFolder, find_runs

LAUNCHER_S = 5.0  # starting a step's process and the first of its jobs
OLD_PACE_S = 30.0  # estimated seconds of finished jobs from which on their real time corrects the estimate


@dataclass(frozen=True)
class Progress:
    """What the records say of one step.

    Attributes:
        step: The step.
        jobs: How many jobs it has, as far as is known; none for a seed whose network to start from diverged.
        states: Number of jobs by state, as far as the sweep has listed them.
        done_seeds: Seeds with a run that is done: what other steps can start from.
        diverged_seeds: Seeds whose only runs diverged.
        spent_s: Seconds that the jobs took that are done.
    """

    step: Step
    jobs: int
    states: Mapping[str, int]
    done_seeds: frozenset[int]
    diverged_seeds: frozenset[int]
    spent_s: float

    @property
    def ended(self) -> int:
        """Jobs that are done or diverged."""
        return self.states.get("done", 0) + self.states.get("diverged", 0)

    @property
    def left(self) -> int:
        """Jobs that are not."""
        return max(self.jobs - self.ended, 0)

    def words(self) -> str:
        """Say it in a few words, e.g. ``"2 of 3 done, 1 failed"``."""
        if not any(count for state, count in self.states.items() if state != "waiting"):
            return "not begun" if self.jobs else "what it starts from diverged"
        diverged, failed = self.states.get("diverged", 0), self.states.get("failed", 0)
        unfinished = sum(self.states.get(state, 0) for state in ("running", "killed", "interrupted"))
        parts = [f"{self.ended} of {self.jobs} done" if self.left else "done"]
        parts += [f"{diverged} diverged"] if diverged else []
        parts += [f"{failed} failed"] if failed else []
        parts += [f"{unfinished} begun"] if unfinished else []
        return ", ".join(parts)


def progress(chain: Chain, step: Step, sweeps: Path) -> Progress:
    """Read the records of a step.

    Args:
        chain: The chain it belongs to.
        step: The step.
        sweeps: The folder ``outputs/sweeps``.
    """
    folder = sweeps / chain.folder_name(step.name)
    runs = _read(folder)
    states = _states(folder, runs)
    done, diverged = _seeds_by_outcome(runs)
    spent = sum(float((run.get("time") or {}).get("wall_s", 0.0)) for run in runs if run["state"] == "done")
    lost = 0
    if step.warm_start is not None:
        _, no_start = _seeds_by_outcome(_read(sweeps / chain.folder_name(step.warm_start)))
        lost = step.cells * len(no_start & set(step.seeds))
    jobs = max(chain.num_jobs(step) - lost, sum(states.values()))
    return Progress(step, jobs, states, done, diverged, spent)


def estimate_s(chain: Chain, states: list[Progress]) -> dict[str, float]:
    """Return the seconds that each step may still take.

    The numbers are those of two CPU cores; once enough jobs are done, the time they really took corrects them.

    Args:
        chain: The chain.
        states: What the records say of each step.

    Returns:
        Seconds by the step's name, 0 where nothing is left.
    """
    planned = sum(chain.job_s(each.step) * each.states.get("done", 0) for each in states)
    spent = sum(each.spent_s for each in states)
    pace = spent / planned if planned >= OLD_PACE_S and spent > 0 else 1.0
    return {
        each.step.name: LAUNCHER_S + pace * chain.job_s(each.step) * each.left if each.left else 0.0
        for each in states
    }


def table(chain: Chain, states: list[Progress]) -> str:
    """Return the steps, their figures, jobs, state and time left as text, one line a step."""
    left = estimate_s(chain, states)
    rows = [("step", "figures", "jobs", "state", "time left")]
    rows += [
        (each.step.name, each.step.figures, str(each.jobs), each.words(), _left(left[each.step.name]))
        for each in states
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines)


def headline(chain: Chain, states: list[Progress]) -> str:
    """Say how many jobs there are, how many are done and how long the rest may take."""
    jobs, ended = sum(each.jobs for each in states), sum(each.ended for each in states)
    seconds = sum(estimate_s(chain, states).values())
    text = f"the paper at scale {chain.scale.name}, {chain.data} data: {len(states)} steps, {jobs} jobs, {ended} done"
    return text if not seconds else f"{text}; about {duration(seconds)} to go on two CPU cores"


def duration(seconds: float) -> str:
    """Return a rough duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def _seeds_by_outcome(runs: list[dict[str, Any]]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the seeds with a run that is done, and those with one that diverged and none that is done."""
    done = frozenset(run["seed"] for run in runs if run["state"] == "done")
    return done, frozenset(run["seed"] for run in runs if run["state"] == "diverged") - done


def _left(seconds: float) -> str:
    return duration(seconds) if seconds else "-"


def _states(folder: Path, runs: list[dict[str, Any]]) -> Counter[str]:
    """Count the jobs of a sweep by state, those included that failed before their run began."""
    sweep = SweepFolder(folder)
    if sweep.sweep_json.is_file():
        try:
            return Counter(cell.state for cell in sweep.cells())
        except InputError as error:
            say(f"counting runs instead of jobs: {error}")
    return Counter(str(run["state"]) for run in runs)


def _read(folder: Path) -> list[dict[str, Any]]:
    found = []
    for run in find_runs(folder):
        try:
            found.append(run.read_run())
        except InputError as error:
            say(f"left out: {error}")
    return found
