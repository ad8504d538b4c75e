"""The three curves of the paper in a few minutes: synthetic radiographs, laptop scale, a table and a figure.

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
CURVES = (("sgd", "resnet_bn"), ("sgd", "resnet_fixup"), ("ggn", "resnet_fixup"))


def main() -> int:
    """Train, tabulate, draw; return the exit code of the first step that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="laptop", choices=("laptop", "debug"), help="trainer to use")
    parser.add_argument("--epochs", type=int, help="epochs a curve (default: that of the scale)")
    given = parser.parse_args()
    folder = ROOT / "outputs" / "demo" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for number, (optimizer, model) in enumerate(CURVES, start=1):
        print(f"\n[{number}/{len(CURVES)}] {optimizer} on {model}, synthetic radiographs", flush=True)
        command = ["train.py", "dataset=rsna_synthetic", f"optimizer={optimizer}", f"model={model}"]
        command += [f"trainer={given.scale}", f"hydra.run.dir={folder / f'{optimizer}_{model}'}"]
        command += [f"trainer.epochs={given.epochs}"] if given.epochs else []
        code = run(command)
        if code not in (DONE, DIVERGED):
            return code
    print(flush=True)
    draw = ["scripts/make_figures.py", "--runs", str(folder)]
    return run([*draw, "--table"]) or run([*draw, "--out", str(folder / "figures")])


def run(arguments: list[str]) -> int:
    """Run one of our own command lines in this interpreter's environment and return its exit code."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
