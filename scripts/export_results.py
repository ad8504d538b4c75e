"""Write finished runs into one results file, small enough to publish, or check such files.

python scripts/export_results.py --out outputs/results/mine.csv                    # all runs under outputs/
python scripts/export_results.py --runs outputs/sweeps/fig1 --out outputs/results/fig1.csv
python scripts/export_results.py --check outputs/results/rotation_mednist_laptop.csv
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError, counted  # noqa: E402
from gramgn.records import ENDED, RUN_KEY, newest, runs, write_results  # noqa: E402

if TYPE_CHECKING:
    import pandas as pd


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
        help="folders to search for runs, or results files (default: outputs)",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="the CSV file to write, e.g. outputs/results/mine.csv")
    action.add_argument("--check", type=Path, nargs="+", help="results files to check instead")
    given = parser.parse_args(arguments)
    try:
        if given.check:
            for path in given.check:
                print(f"{path}: {summary(runs(path))}")
            return 0
        table = newest(runs(*given.runs))
        if not table["state"].isin(ENDED).any():
            raise InputError(
                f"no finished run under {', '.join(map(str, given.runs))}; make one with make demo or train.py"
            )
        try:
            given.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {given.out.parent}: {error.strerror or error}"
            ) from error
        write_results(table, given.out)
        print(f"{given.out}: {summary(table)}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def summary(table: pd.DataFrame) -> str:
    """Return what a table holds, e.g. `"6 rows, 2 runs: 2 of fig1/afad_sgd_bn"`."""
    jobs = table.drop_duplicates(list(RUN_KEY))
    names = jobs["sweep"].fillna(jobs["experiment"]).fillna("other runs").value_counts().sort_index()
    unfinished = int((~jobs["state"].isin(ENDED)).sum())
    left = f" ({unfinished} unfinished)" if unfinished else ""
    parts = ", ".join(f"{count} of {name}" for name, count in names.items())
    return f"{counted(len(table), 'row')}, {counted(len(jobs), 'run')}{left}: {parts}"


if __name__ == "__main__":
    raise SystemExit(main())
