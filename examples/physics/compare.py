"""Error against seconds of Gram-Gauss-Newton, Adam and L-BFGS on problems of physics.

    python examples/physics/compare.py poisson_2d              # 30 seconds per run: 12 minutes
    python examples/physics/compare.py heat --seconds 8 --seeds 1 --optimizers ggn adam

Each optimizer has five settings. They are tried for the same seconds, from another start than those of the runs;
the one with the least error on the validation points then runs from each seed and is judged on the held-out points.
Everything is in float64. Evaluation does not count as seconds.

Writes `physics_<problem>.csv`, whose rows are runs and what was tried, and the network of Gram-Gauss-Newton's first
run; `report.py` draws pictures and tables of them. Runs that the file holds are not run again.
"""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from deeponet import deeponet
from heat import coefficient, heat
from lennard_jones import lennard_jones
from optimizers import SETTINGS, Take
from poisson import poisson
from problem import HELD_OUT, VALIDATION, Problem
from torch import nn

from gramgn.errors import counted
from gramgn.records import git_state, processor_name, write_atomic

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "poisson_2d": lambda: poisson(2, 400, 100),
    "poisson_5d": lambda: poisson(5, 800, 400),
    "heat": heat,
    "coefficient": coefficient,
    "deeponet": deeponet,
    "lennard_jones": lennard_jones,
}
TUNING_SEED = 100
Curve = list[tuple[float, int, float]]
"""Seconds, steps and error."""


@dataclass(frozen=True)
class Run:
    """One training: what the first columns of a row say."""

    points: str  # on which the error was measured: "validation" or "held-out"
    optimizer: str
    setting: str
    seed: int
    budget_s: float


class Table:
    """The rows of a CSV file, which grows run by run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves: dict[Run, Curve] = {}
        self._rows: list[dict[str, object]] = []
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    self._rows.append(dict(row))
                    text = [row[field.name] for field in fields(Run)]
                    run = Run(text[0], text[1], text[2], int(text[3]), float(text[4]))
                    point = (float(row["seconds"]), int(row["steps"]), float(row["error"]))
                    self.curves.setdefault(run, []).append(point)

    def add(self, run: Run, curve: Curve) -> None:
        """Add a run and write the file."""
        self.curves[run] = curve
        state = git_state(Path(__file__).resolve().parents[2])
        where = {
            "device": f"{processor_name()}, {counted(torch.get_num_threads(), 'thread')}",
            "torch": torch.__version__,
            "kernels": "off",  # they serve float32
            "git": (state["commit"] or "unknown")[:12] + ("+" if state["dirty"] else ""),
        }
        for seconds, steps, error in curve:
            point = {"seconds": f"{seconds:.3f}", "steps": steps, "error": f"{error:.4e}"}
            self._rows.append({**asdict(run), **point, **where})
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self._rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, text.getvalue())

    def tried(self, optimizer: str) -> dict[str, float]:
        """Return the error of each setting of an optimizer on the validation points."""
        return {
            run.setting: curve[-1][2]
            for run, curve in self.curves.items()
            if run.points == "validation" and run.optimizer == optimizer
        }

    def chosen(self, optimizer: str) -> str:
        """Return the setting with the least of these errors."""
        tried = self.tried(optimizer)
        return min(tried, key=tried.__getitem__)

    def runs(self, optimizer: str) -> list[Curve]:
        """Return the runs of the chosen setting of an optimizer."""
        return [
            curve
            for run, curve in self.curves.items()
            if run.points == "held-out" and run.optimizer == optimizer
        ]


def trained(problem: Problem, take: Take, seconds: float, seed: int, points: int) -> tuple[nn.Module, Curve]:
    """Train for some seconds; return the network and its curve."""
    torch.manual_seed(seed)
    model, spent, steps, due = problem.model(), 0.0, 0, 0.0
    curve = [(0.0, 0, problem.error(model, points))]
    several = take(model, problem, lambda: min(1.0, spent / seconds))
    while spent < seconds:
        begun = time.perf_counter()
        next(several)
        spent += time.perf_counter() - begun
        steps += 1
        if spent >= due or spent >= seconds:
            curve.append((spent, steps, problem.error(model, points)))
            due = 1.1 * spent
    return model, curve


def compare(name: str, seconds: float, seeds: int, optimizers: Sequence[str], out: Path) -> Table:
    """Choose a setting for each optimizer and run it from each seed; return the file's content."""
    problem, table = PROBLEMS[name](), Table(out / f"physics_{name}.csv")

    def run(points: int, optimizer: str, setting: str, seed: int, budget: float) -> None:
        run = Run("validation" if points == VALIDATION else "held-out", optimizer, setting, seed, budget)
        if run not in table.curves:
            model, curve = trained(problem, SETTINGS[optimizer][setting], budget, seed, points)
            # Of a trial only the end counts.
            table.add(run, curve[-1:] if points == VALIDATION else curve)
            if (points, optimizer, seed) == (HELD_OUT, "ggn", 0):
                torch.save(model.state_dict(), out / f"physics_{name}.pt")
        print(f"{name}: {optimizer}, {setting}, seed {seed}: {table.curves[run][-1][2]:.1e}", flush=True)

    for optimizer in optimizers:
        for setting in SETTINGS[optimizer]:
            run(VALIDATION, optimizer, setting, TUNING_SEED, seconds)
        for seed in range(seeds):
            run(HELD_OUT, optimizer, table.chosen(optimizer), seed, seconds)
    return table


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("problems", nargs="+", choices=[*PROBLEMS, "all"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("outputs/physics"))
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    for name in PROBLEMS if "all" in given.problems else given.problems:
        compare(name, given.seconds, given.seeds, given.optimizers, given.out)


if __name__ == "__main__":
    main()
