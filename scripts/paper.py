"""Run the paper's experiments one after another: figures 1a to 2c, at a chosen scale.

python scripts/paper.py                               # laptop scale, stand-in data: about an hour on two cores
python scripts/paper.py --scale paper --data real     # full size, AFAD-LITE and RSNA: a matter for a GPU
python scripts/paper.py --list                        # the steps and how far each is
python scripts/paper.py tracking=none                 # overrides for every step

Real data lie in data/raw/afad and data/raw/rsna (links will do). May be stopped at any time, by Ctrl-C or
kill; the same command goes on where it was.
Exit codes: 0 all done, 1 a step failed or was left out, 2 bad input, 130 and 143 stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import report_errors, set_repository  # noqa: E402
from gramgn.app._folders import register_resolvers  # noqa: E402
from gramgn.app._paper import DATA, SCALES, Chain  # noqa: E402
from gramgn.app._paper_run import check_overrides, list_chain, run_chain  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", default="laptop", choices=tuple(SCALES), help="default: laptop")
    parser.add_argument("--data", default="synthetic", choices=DATA, help="default: synthetic, the stand-ins")
    parser.add_argument("--list", action="store_true", help="print the steps and their state, run nothing")
    parser.add_argument("overrides", nargs="*", help="key=value for every step, as for train.py")
    given = parser.parse_intermixed_args(arguments)
    set_repository(ROOT)
    register_resolvers()
    code = [0]
    ended = 0
    with report_errors(code):
        check_overrides(given.overrides)
        chain = Chain(SCALES[given.scale], given.data, tuple(given.overrides))
        if given.list:
            print(list_chain(chain))
        else:
            ended = run_chain(chain)
    return code[0] or ended


if __name__ == "__main__":
    raise SystemExit(main())
