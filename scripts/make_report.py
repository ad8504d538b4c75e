"""Write one HTML page about all runs: claims, figures, a table that sorts and filters, every run's settings.

python scripts/make_report.py                                        # outputs/ -> outputs/report/index.html
python scripts/make_report.py --runs outputs/sweeps/fig1 --out outputs/report/fig1.html
python scripts/make_report.py --results outputs/results/paper.csv    # from published numbers instead of run folders
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError  # noqa: E402
from gramgn.report import make_report  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 written, 2 nothing to report on or bad input."""
    parser = argparse.ArgumentParser(description="Write one HTML page about all runs.")
    outputs = ROOT / "outputs"
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        default=[outputs],
        help="folders to search for runs (default: outputs)",
    )
    source.add_argument("--results", type=Path, nargs="+", help="results CSV files, instead of run folders")
    parser.add_argument("--out", type=Path, default=outputs / "report" / "index.html", help="the HTML file")
    given = parser.parse_args(arguments)
    try:
        print(make_report(*(given.results or given.runs), out=given.out))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
