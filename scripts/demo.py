"""Five short trainings in a few minutes: synthetic radiographs, laptop scale, a table and a figure.

The paper's three curves as printed, a tuned baseline, and GGN as we recommend it.

python scripts/demo.py
python scripts/demo.py --epochs 3 --scale debug
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DONE, DIVERGED = 0, 3
# The strongest baseline on this data set, docs/results.md.
TUNED = "optimizer=muon model=resnet_bn schedule=one_cycle optimizer.lr=0.07 trainer.batch_size=64"
RECOMMENDED = (
    "optimizer=ggn_recommended model=resnet_gn schedule=one_cycle schedule.alpha=0.03 trainer.batch_size=64"
)
CURVES = {
    "the paper's baseline, SGD on ResNetBN": "optimizer=sgd model=resnet_bn",
    "the paper's baseline, SGD on ResNetFixup": "optimizer=sgd model=resnet_fixup",
    "the paper's GGN on ResNetFixup": "optimizer=ggn model=resnet_fixup",
    "a tuned baseline, Muon on ResNetBN": TUNED,
    "recommended, GGN with momentum on ResNetGN": RECOMMENDED,
}
WHAT_TO_LOOK_AT = """
Look at the test loss per epoch. The paper's literal GGN stands still at
first, since the last layer starts at zero, and then overshoots: see
docs/first_epochs.md. The recommended form does neither.
"""


def main() -> int:
    """Train, tabulate, draw; return the exit code of the first step that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="laptop", choices=("laptop", "debug"), help="trainer to use")
    parser.add_argument("--epochs", type=int, help="epochs per curve (default: that of the scale)")
    given = parser.parse_args()
    folder = ROOT / "outputs" / "demo" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for number, (title, words) in enumerate(CURVES.items(), start=1):
        print(f"\n[{number}/{len(CURVES)}] {title}, synthetic radiographs", flush=True)
        command = ["train.py", "dataset=rsna_synthetic", f"trainer={given.scale}", *words.split()]
        command += [f"hydra.run.dir={folder / str(number)}"]
        command += [f"trainer.epochs={given.epochs}"] if given.epochs else []
        code = run(command)
        if code not in (DONE, DIVERGED):
            return code
    print(flush=True)
    draw = ["scripts/make_figures.py", "--runs", str(folder)]
    code = run([*draw, "--table"]) or run([*draw, "--out", str(folder / "figures")])
    print(WHAT_TO_LOOK_AT)
    return code


def run(arguments: list[str]) -> int:
    """Run one of our own command lines in this interpreter's environment and return its exit code."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
