"""Tables and pictures of what `compare.py` wrote.

    python examples/physics/report.py --runs outputs/physics --page docs/physics.md --figures outputs/results/figures

The tables replace what stands between `<!-- table: ... -->` and `<!-- end -->` in the page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from compare import PROBLEMS, Curve, Table
from optimizers import SETTINGS

NAMES = {"ggn": "Gram-Gauss-Newton", "adam": "Adam", "lbfgs": "L-BFGS"}
TIMES = (1, 3, 10, 30)


def at(curve: Curve, seconds: float) -> float:
    """Return the last error that was measured up to some time, within 5 %."""
    return [error for spent, _, error in curve if spent <= 1.05 * seconds][-1]


def spread(errors: Sequence[float]) -> str:
    """Return the median, and least to greatest."""
    return f"{median(errors):.1e} ({min(errors):.1e} to {max(errors):.1e})"


def results(tables: dict[str, Table]) -> str:
    """Return the table of final errors."""
    lines = [
        "| problem | Gram-Gauss-Newton | Adam | L-BFGS | least of the others / ours | ours is below it after |",
        "|---|---|---|---|---|---|",
    ]
    for name, table in tables.items():
        ends = {optimizer: [curve[-1][2] for curve in table.runs(optimizer)] for optimizer in NAMES}
        best = min(median(ends[optimizer]) for optimizer in ("adam", "lbfgs"))
        ours = median(ends["ggn"])
        reached = [next((s for s, _, e in curve if e < best), float("inf")) for curve in table.runs("ggn")]
        cells = [f"`{name}`", *(spread(errors) for errors in ends.values())]
        gain, when = float(f"{best / ours:.2g}"), median(reached)
        after = "never" if when == float("inf") else f"{when:.2g} s"
        lines.append(f"| {' | '.join(cells)} | {gain:,g} | {after} |")
    return "\n".join(lines)


def over_time(tables: dict[str, Table]) -> str:
    """Return the table of median errors and steps after some seconds."""
    times = " | ".join(f"{seconds} s" for seconds in TIMES)
    lines = [f"| problem | optimizer, chosen setting | steps | {times} |", "|---" * (3 + len(TIMES)) + "|"]
    for name, table in tables.items():
        for optimizer, label in NAMES.items():
            curves = table.runs(optimizer)
            errors = [f"{median(at(curve, seconds) for curve in curves):.1e}" for seconds in TIMES]
            steps = round(median(curve[-1][1] for curve in curves))
            lines.append(
                f"| `{name}` | {label}, {table.chosen(optimizer)} | {steps:,} | {' | '.join(errors)} |"
            )
    return "\n".join(lines)


def tuning(tables: dict[str, Table]) -> str:
    """Return the table of what was tried."""
    settings = [f"{NAMES[optimizer]}, {each}" for optimizer in NAMES for each in SETTINGS[optimizer]]
    lines = [f"| setting | {' | '.join(f'`{name}`' for name in tables)} |", "|---" * (1 + len(tables)) + "|"]
    for label, (optimizer, setting) in zip(
        settings, ((o, s) for o in NAMES for s in SETTINGS[o]), strict=True
    ):
        errors = [f"{table.tried(optimizer)[setting]:.1e}" for table in tables.values()]
        lines.append(f"| {label} | {' | '.join(errors)} |")
    return "\n".join(lines)


def tables_of(runs: dict[str, Table]) -> dict[str, str]:
    """Return the tables of the page by name."""
    return {"results": results(runs), "over time": over_time(runs), "tuning": tuning(runs)}


def draw(name: str, table: Table, network: Path, file: Path) -> None:
    """Draw the errors against the seconds, next to the solution where there is a network."""
    from matplotlib.figure import Figure

    problem = PROBLEMS[name]()
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    for number, (optimizer, label) in enumerate(NAMES.items()):
        for seed, curve in enumerate(table.runs(optimizer)):
            left.plot(
                [seconds for seconds, _, _ in curve[1:]],
                [error for _, _, error in curve[1:]],
                color=f"C{number}",
                linewidth=1,
                label=None if seed else label,
            )
    left.set(xscale="log", yscale="log", xlabel="seconds", ylabel="relative error", title=problem.title)
    left.legend()
    model = problem.model()
    model.load_state_dict(torch.load(network))
    problem.plot(model, right)
    figure.savefig(file, dpi=100)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("outputs/physics"))
    parser.add_argument(
        "--page", type=Path, help="the page whose tables are written; default: they are printed"
    )
    parser.add_argument("--figures", type=Path, help="the folder of the pictures; default: none are drawn")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    found = {name: Table(given.runs / f"physics_{name}.csv") for name in PROBLEMS}
    tables = {name: table for name, table in found.items() if all(map(table.runs, NAMES))}
    if not tables:
        parser.error(f"{given.runs} has no problem with runs of all three optimizers: run compare.py first")
    written = tables_of(tables)
    if given.page is None:
        print("\n\n".join(written.values()))
    else:
        given.page.write_text(filled(given.page.read_text(), written))
    if given.figures is not None:
        for name, table in tables.items():
            draw(name, table, given.runs / f"physics_{name}.pt", given.figures / f"physics-{name}.png")


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with these tables."""
    for name, table in tables.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        page = re.sub(f"(?s){begin}.*?{end}", lambda _: f"{begin}\n{table}\n{end}", page)  # noqa: B023
    return page


if __name__ == "__main__":
    main()
