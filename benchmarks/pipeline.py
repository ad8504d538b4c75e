"""Measure the costs of the pipeline: start-up, overhead per epoch relative to the steps, memory over epochs.

python benchmarks/pipeline.py
python benchmarks/pipeline.py --optimizer sgd --model resnet_bn --epochs 4

Preparing images is measured by benchmarks/prepare.py. Run both on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

REPEATS = 5
MEMORY_EPOCHS = 60


def main() -> None:
    """Print the three measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizer", default="ggn", help="choice of conf/optimizer")
    parser.add_argument("--model", default="resnet_fixup", help="choice of conf/model")
    parser.add_argument("--scale", default="laptop", help="choice of conf/trainer for the overhead")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the overhead measurement")
    given = parser.parse_args()
    start_up()
    with tempfile.TemporaryDirectory() as scratch:
        overhead(given, Path(scratch) / "overhead")
        memory(given, Path(scratch) / "memory")


def start_up() -> None:
    """Time the commands that must answer immediately."""
    for flags in (["--help"], ["--cfg", "job"]):
        command = [sys.executable, "train.py", *flags]
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            seconds.append(time.perf_counter() - start)
        print(f"train.py {' '.join(flags):<10} {spread(seconds)} (goal: under 1.5 s)")


def overhead(given: argparse.Namespace, folder: Path) -> None:
    """Time the optimizer's steps within a run and print the cost of an epoch outside of them."""
    from gramgn.training import Stepper

    steps_s: list[float] = []
    take_step = Stepper.__call__

    def timed(self: Stepper, inputs: Any, targets: Any, **options: Any) -> Any:
        start = time.perf_counter()
        report = take_step(self, inputs, targets, **options)
        steps_s.append(time.perf_counter() - start)
        return report

    Stepper.__call__ = timed  # type: ignore[method-assign]
    run = train(given, given.scale, given.epochs, folder)
    seconds = run["time"]
    in_steps = sum(steps_s)
    epoch_s = seconds["train_s"] + seconds["log_s"] + seconds["checkpoint_s"]
    print(
        f"{given.optimizer} on {given.model}, {given.scale}, {given.epochs} epochs: step {spread(steps_s)}\n"
        f"  outside the steps {1 - in_steps / epoch_s:.1%} of an epoch (goal: under 5 %): batches "
        f"{seconds['train_s'] - in_steps:.2f} s, checkpoints {seconds['checkpoint_s']:.2f} s, records and W&B "
        f"{seconds['log_s']:.2f} s\n"
        f"  evaluation of val and test, not counted above: {seconds['eval_s']:.2f} s "
        f"({seconds['eval_s'] / (epoch_s + seconds['eval_s']):.1%}); start-up {seconds['startup_s']:.1f} s"
    )


def memory(given: argparse.Namespace, folder: Path) -> None:
    """Print the peak memory of a run after few and after many epochs."""
    train(given, "debug", MEMORY_EPOCHS, folder)
    lines = (folder / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("peak_mem_mib")
    peaks = [float(line.split(",")[column]) for line in lines[1:]]
    shown = {epoch: peaks[epoch - 1] for epoch in (2, 10, MEMORY_EPOCHS)}
    print(
        "peak memory, debug scale: " + ", ".join(f"{peak:.0f} MiB at epoch {n}" for n, peak in shown.items())
    )


def train(given: argparse.Namespace, scale: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Do one run in this process and return its run.json."""
    from gramgn.app import Job, compose_config, plain, set_repository
    from gramgn.app import train as train_job

    set_repository(ROOT)
    choices = {"optimizer": given.optimizer, "model": given.model, "trainer": scale}
    overrides = [*(f"{group}={choice}" for group, choice in choices.items()), f"trainer.epochs={epochs}"]
    config = plain(compose_config(overrides))
    train_job(Job(config=config, choices=choices, overrides=overrides, folder=folder))
    return dict(json.loads((folder / "run.json").read_text()))


def spread(seconds: list[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    main()
