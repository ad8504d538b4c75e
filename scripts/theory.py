"""Run the theory's studies: three sweeps of the two-layer network, each of which the same command completes.

python scripts/theory.py                        # all: under 10 minutes on two idle cores
python scripts/theory.py quadratic cyclic       # some of them
python scripts/theory.py --smoke                # tiny networks, two seeds: seconds

Data are SYNTHETIC points on the sphere. `python benchmarks/cost.py` measures the parts of a step for figure T5.
Exit codes: 0 all done, 1 a job failed, 2 bad input, 130 and 143 stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import train_command  # noqa: E402
from gramgn.figures import claims_text, read_runs, theory_claims, theory_title  # noqa: E402
from gramgn.progress import say  # noqa: E402

STUDIES = ("quadratic", "cyclic", "methods")
SMOKE = {
    "quadratic": ["model.width=64,128"],
    "cyclic": [
        "hydra.sweeper.points=['trainer.batch_size=20 model.width=64','trainer.batch_size=30 model.width=128']"
    ],
    "methods": ["model.width=128"],
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "studies", nargs="*", metavar="study", help=f"of: {', '.join(STUDIES)} (default: all)"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny networks, two seeds")
    given = parser.parse_args(arguments)
    if unknown := [study for study in given.studies if study not in STUDIES]:
        parser.error(f"there is no study {', '.join(unknown)}; there are: {', '.join(STUDIES)}")

    worst, folders = 0, []
    for study in given.studies or STUDIES:
        name = f"theory-smoke-{study}" if given.smoke else f"theory-{study}"
        extra = [*SMOKE[study], "seed=0,1"] if given.smoke else []
        words = [f"sweep=theory_{study}", f"name={name}", "tracking=none", *extra]
        say(f"python train.py {shlex.join(words)}")
        code = train_command(words, ROOT)
        if code not in (0, 1):
            return code
        worst = max(worst, code)
        folders.append(ROOT / "outputs" / "sweeps" / name)
    theory = read_runs(*folders).theory
    measured = [claim for claim in theory_claims(theory) if claim.measurements]
    print(claims_text(theory_title(theory), measured), end="")
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
