"""Write finished runs into one results file, small enough to publish, or check such files.

python scripts/export_results.py --out outputs/results/mine.csv                    # all runs under outputs/
python scripts/export_results.py --runs outputs/sweeps/fig1 --out outputs/results/fig1.csv
python scripts/export_results.py --check outputs/results/rotation_mednist_laptop.csv
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError  # noqa: E402
from gramgn.figures import Shown, read_runs  # noqa: E402
from gramgn.records import WAITING, runs, write_results  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 written or in order, 2 no runs or bad input."""
    parser = argparse.ArgumentParser(
        description="Write finished runs into one results file, or check such files."
    )
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        default=[ROOT / "outputs"],
        help="folders to search for runs (default: outputs)",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="the CSV file to write, e.g. outputs/results/mine.csv")
    action.add_argument("--check", type=Path, nargs="+", help="results files to check instead")
    given = parser.parse_args(arguments)
    try:
        if given.check:
            for path in given.check:
                print(f"{path}: {contents(read_runs(path))}")
            return 0
        shown = read_runs(*given.runs)
        rows = shown.rows[shown.rows.state != WAITING]
        if not len(shown.finished):  # only runs of the theory's studies
            rows = runs(*given.runs)
            rows = rows[rows.state == "done"]
        write_results(rows, given.out)
        print(f"{given.out}: {len(rows)} rows, {contents(shown)}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def contents(shown: Shown) -> str:
    """Return one line that says what a results file holds.

    Args:
        shown: Its runs.
    """
    heads = shown.rows[shown.rows.state != WAITING].drop_duplicates("run")
    if shown.theory and not len(heads):
        return f"the theory: {len(shown.theory.runs)} runs, {len(shown.theory.costs)} timed steps"
    names = heads.sweep.where(heads.sweep != "", heads.experiment).replace("", "other runs")
    finished = shown.finished.run.nunique()
    unfinished = f", {len(heads) - finished} unfinished" if len(heads) > finished else ""
    counts = ", ".join(f"{count} of {name}" for name, count in names.value_counts().sort_index().items())
    return f"{finished} runs{unfinished}: {counts}"


if __name__ == "__main__":
    raise SystemExit(main())
