"""Draw the paper's panels, the theory's figures, and comparisons of whatever else was run.

Without sources, all runs of the paper's experiments below outputs/ are drawn, and the files of `make theory`; with
`--runs` or `--results`, all runs given. Runs that differ in a setting are separate curves, labelled by what differs;
runs on other images or with another number of threads are separate figures; of repetitions the newest counts.

python scripts/make_figures.py                                  # outputs/ -> outputs/figures/
python scripts/make_figures.py --runs outputs/sweeps/fig1 --out outputs/figures
python scripts/make_figures.py --results outputs/results/rotation_mednist_laptop.csv
python scripts/make_figures.py --table                          # a table instead of figures
python scripts/make_figures.py --claims                         # the paper's claims and what was measured
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError  # noqa: E402
from gramgn.figures import (  # noqa: E402
    Shown,
    claims_table,
    claims_text,
    figure_sets,
    make_figures,
    read_runs,
    summary_table,
    theory_claims,
    theory_title,
)

OUTPUTS = ROOT / "outputs"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 drawn, 2 nothing to draw or bad input."""
    parser = argparse.ArgumentParser(description="Draw figures from finished runs.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        help="folders of runs or sweeps (default: the paper's runs in outputs)",
    )
    source.add_argument(
        "--results", type=Path, nargs="+", help="results CSV files to draw from instead of runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for PDF and PNG files (default: outputs/figures; outputs/results/figures with --results)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--table", action="store_true", help="print a table of the runs instead")
    instead.add_argument(
        "--claims", action="store_true", help="print the paper's claims with what was measured"
    )
    given = parser.parse_args(arguments)
    sources = given.results or given.runs
    try:
        shown = read_runs(*(sources or [OUTPUTS]), paper_only=not sources and not given.table)
        if given.table:
            print(summary_table(shown.finished) if len(shown.finished) else "no runs\n", end="")
        elif given.claims:
            print(all_claims(shown), end="")
        else:
            out = given.out or OUTPUTS / ("results/figures" if given.results else "figures")
            for path in make_figures(shown, out):
                print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def all_claims(shown: Shown) -> str:
    """Return the claims of each figure set, and those of the theory, as text.

    Args:
        shown: The runs.

    Raises:
        InputError: There is nothing that a claim can be measured on.
    """
    sets, _ = figure_sets(shown.rows)
    texts = [claims_table(figures) for figures in sets]
    if shown.theory:
        texts.append(claims_text(theory_title(shown.theory), theory_claims(shown.theory)))
    if not texts:
        raise InputError(
            "none of these runs is of a panel of the paper, and there is nothing of the theory. `make paper` and "
            "`make theory` make them."
        )
    return "\n".join(texts)


if __name__ == "__main__":
    raise SystemExit(main())
