"""Draw loss against time and epochs from whatever finished runs there are.

python scripts/make_figures.py                                  # outputs/ -> outputs/figures/
python scripts/make_figures.py --runs outputs/sweeps/fig1 --out outputs/figures
python scripts/make_figures.py --table                          # a table instead of figures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.errors import InputError  # noqa: E402
from gramgn.figures import finished_runs, make_figures, summary_table  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 drawn, 2 nothing to draw or bad input."""
    parser = argparse.ArgumentParser(description="Draw figures from finished runs.")
    outputs = ROOT / "outputs"
    parser.add_argument("--runs", type=Path, default=outputs, help="folder to search for runs")
    parser.add_argument("--out", type=Path, default=outputs / "figures", help="folder for PDF and PNG files")
    parser.add_argument("--table", action="store_true", help="print a table of the runs instead")
    given = parser.parse_args(arguments)
    try:
        if given.table:
            print(summary_table(finished_runs(given.runs)), end="")
        else:
            for path in make_figures(given.runs, given.out):
                print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
