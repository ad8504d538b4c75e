"""Run the theory's studies: quadratic convergence, the Gauss-Seidel rate, other methods, the cost of a step's parts.

python scripts/theory.py                                # into outputs/theory: under 10 minutes on two idle cores
python scripts/theory.py quadratic cyclic               # some of them
python scripts/theory.py --out outputs/results          # the files to publish
python scripts/theory.py --smoke --out /data/theory     # tiny, seconds: shows that all works

Data are SYNTHETIC points on the sphere; the costs are those of the real networks on noise. May be stopped at any
time; the same command goes on where it was.
Exit codes: 0 done, 2 bad input, 130 and 143 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # the costs are measured by the benchmarks
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks on stderr

from gramgn.app import report_errors, set_repository  # noqa: E402
from gramgn.app._theory import FULL, SMOKE, STUDIES, run_studies  # noqa: E402
from gramgn.figures import claims_text, read_theory, theory_claims, theory_title  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "studies", nargs="*", metavar="study", help=f"of: {', '.join(STUDIES)} (default: all)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "theory", help="folder for the files")
    parser.add_argument("--force", action="store_true", help="run again what is there")
    parser.add_argument("--smoke", action="store_true", help="tiny networks, two seeds")
    given = parser.parse_args(arguments)
    if unknown := [study for study in given.studies if study not in STUDIES]:
        parser.error(f"there is no study {', '.join(unknown)}; there are: {', '.join(STUDIES)}")
    set_repository(ROOT)
    code = [0]
    with report_errors(code):
        files = run_studies(
            given.studies or list(STUDIES), given.out, scale=SMOKE if given.smoke else FULL, force=given.force
        )
        theory = read_theory(files)
        measured = [claim for claim in theory_claims(theory) if claim.measurements]
        print(claims_text(theory_title(theory), measured), end="")
        for file in files:
            print(file)
    return code[0]


if __name__ == "__main__":
    raise SystemExit(main())
