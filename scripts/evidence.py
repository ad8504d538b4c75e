"""Run the comparison of docs/protocol.md: blocks of sweeps, each of which the same command completes.

python scripts/evidence.py --list               # the blocks, their numbers of runs and how many are missing
python scripts/evidence.py --block tune         # one block
python scripts/evidence.py                      # all of them: about 10 hours on two idle cores
python scripts/evidence.py --targets            # epochs and seconds to the strongest baseline's losses

A block is written to outputs/results/evidence_<block>.csv, also when it is stopped. Runs that are in that file already
are not repeated, so that a block continues on any machine. Real images lie in data/raw/rotation (one .npz file) and
data/raw/retinamnist. Exit codes: 0 all done, 1 a run failed, 2 bad input, 130 and 143 stopped.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from omegaconf import OmegaConf  # noqa: E402

from gramgn.app import train_command  # noqa: E402
from gramgn.errors import InputError, counted  # noqa: E402
from gramgn.progress import say  # noqa: E402
from gramgn.records import final_loss, identifying, runs, short_hash, time_to_target, write_results  # noqa: E402

SWEEPS, RESULTS = ROOT / "outputs" / "sweeps", ROOT / "outputs" / "results"
REAL, SYNTHETIC = ("rotation", "retinamnist"), ("rsna_synthetic", "afad_synthetic")
# Epochs of a third, half and the whole of the length.
BUDGETS = {"laptop": (6, 9, 18), "desk": (10, 15, 30)}
TUNING_SEED = 100
OURS = "ggn_spring-resnet_gn"


def read_methods() -> dict[str, list[str]]:
    """Return the trials of each method by its name, e.g. `"adamw-resnet_bn"`, from `conf/sweep/tuned.yaml`."""
    methods: dict[str, list[str]] = {}
    for words in OmegaConf.load(ROOT / "conf" / "sweep" / "tuned.yaml").hydra.sweeper.points:
        given = dict(word.split("=") for word in words.split())
        methods.setdefault(f"{given['optimizer']}-{given['model']}", []).append(words)
    return methods


METHODS = read_methods()
# As printed, rates and alpha of the data set; the last with alpha next to the sum, as the formula is printed.
PAPER = (
    "optimizer=sgd model=resnet_bn",
    "optimizer=sgd model=resnet_fixup",
    "optimizer=ggn model=resnet_fixup",
    "optimizer=ggn model=resnet_fixup optimizer.damping_convention=sum",
)
# A block's data sets, its scale, and its number of runs per data set.
BLOCKS = {
    "tune": ((*REAL, *SYNTHETIC), "laptop", 72),
    "refine": ((*REAL, *SYNTHETIC), "laptop", 36),
    "final": ((*REAL, *SYNTHETIC), "laptop", 60),
    "paper": ((*REAL, *SYNTHETIC), "laptop", 20),
    "desk": (SYNTHETIC, "desk", 21),
    "desk_paper": (SYNTHETIC, "desk", 9),
}
BLIND = ("tune", "refine")
"""Blocks whose files hold no test losses, so that nothing can be chosen by them."""


def job(dataset: str, scale: str, words: str, epochs: int, seed: int) -> list[str]:
    """Return the overrides of a run."""
    return [
        f"dataset={dataset}",
        f"trainer={scale}",
        *words.split(),
        f"trainer.epochs={epochs}",
        f"seed={seed}",
    ]


def key(words: Sequence[str]) -> str:
    """Return the digits that a run's folder ends with, see `gramgn.app.job_name`."""
    return short_hash(identifying(words))


def results(block: str) -> dict[str, float]:
    """Return the validation loss after the last epoch of each run in a block's file, by `key`; inf if it diverged."""
    path = RESULTS / f"evidence_{block}.csv"
    return read(path, path.stat().st_mtime_ns) if path.is_file() else {}


@cache
def read(path: Path, mtime_ns: int) -> dict[str, float]:
    """Return the content of a results file as `results` does; `mtime_ns` tells one content from another."""
    ends = final_loss(runs(path), column="val_loss")
    return {run.rpartition("-")[2]: loss for run, loss in zip(ends["run"], ends["loss"], strict=True)}


def ranked(dataset: str, method: str, epochs: int) -> list[tuple[float, str]]:
    """Return the trials of a method that ran for a number of epochs and their validation losses, the best first.

    Raises:
        InputError: One of them is not in the committed results.
    """
    half = BUDGETS["laptop"][1]
    found = results("tune") if epochs == half else results("refine")
    words = METHODS[method] if epochs == half else [words for _, words in ranked(dataset, method, half)[:3]]
    losses = []
    for each in words:
        loss = found.get(key(job(dataset, "laptop", each, epochs, TUNING_SEED)))
        if loss is None:
            raise InputError(
                f"{method} on {dataset} is not tuned yet for {epochs} epochs: run the blocks tune and refine first"
            )
        losses.append((loss, each))
    return sorted(losses, key=lambda pair: pair[0])


def planned(block: str, dataset: str) -> list[list[str]]:
    """Return the runs of a block on a data set.

    Raises:
        InputError: They depend on runs that are not in the committed results.
    """
    scale, tuned, lengths = BLOCKS[block][1], BUDGETS["laptop"], BUDGETS[BLOCKS[block][1]]
    third, half, whole = lengths
    if block == "tune":
        return [job(dataset, scale, each, half, TUNING_SEED) for words in METHODS.values() for each in words]
    if block == "refine":
        best = [words for method in METHODS for _, words in ranked(dataset, method, half)[:3]]
        return [
            job(dataset, scale, words, epochs, TUNING_SEED) for words in best for epochs in (third, whole)
        ]
    if block in ("paper", "desk_paper"):
        curves, seeds = (PAPER, range(5)) if block == "paper" else (PAPER[:3], range(3))
        return [job(dataset, scale, words, whole, seed) for words in curves for seed in seeds]
    best_of = {method: min(ranked(dataset, method, each)[0][0] for each in tuned) for method in METHODS}
    first, second = sorted((method for method in METHODS if method != OURS), key=best_of.__getitem__)[:2]
    everywhere, seeds = ((first, second, OURS), range(5)) if block == "final" else ((first, OURS), range(3))
    at_whole = tuple(METHODS) if block == "final" else (first, second, OURS)
    chosen = [(at_whole, whole), (everywhere, third), (everywhere, half)]
    return [
        job(dataset, scale, ranked(dataset, method, tuned[lengths.index(epochs)])[0][1], epochs, seed)
        for methods, epochs in chosen
        for method in methods
        for seed in seeds
    ]


def command(block: str, dataset: str, jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the arguments of train.py for some runs of a block on a data set."""
    points = ",".join(f"'{' '.join(words[2:])}'" for words in jobs)
    common = [f"name=evidence-{block}-{dataset}", *jobs[0][:2], "tracking=none"]
    return ["-m", *common, f"hydra.sweeper.points=[{points}]"]


def run(block: str, extra: Sequence[str]) -> int:
    """Run what is missing of a block and return the exit code."""
    worst = 0
    for dataset in BLOCKS[block][0]:
        jobs, there = planned(block, dataset), results(block)
        missing = [words for words in jobs if key(words) not in there]
        say(f"\n{block} on {dataset}: {counted(len(jobs), 'run')}, {len(missing)} missing")
        if missing:
            try:
                code = train_command([*command(block, dataset, missing), *extra], ROOT)
            finally:
                export(block)
            if code not in (0, 1):
                return code
            worst = max(worst, code)
    return worst


def export(block: str) -> None:
    """Write the finished runs of a block to its results file, added to those that it holds already."""
    path = RESULTS / f"evidence_{block}.csv"
    table = runs(*filter(Path.exists, (SWEEPS, path)))
    table = table[table["run"].str.startswith(f"evidence-{block}-")]
    table = table[table["state"].isin(("done", "diverged"))].drop_duplicates(["run", "epoch"])
    if block in BLIND:
        table[["test_loss", "test_mae"]] = math.nan
    if len(table):
        write_results(table, path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block", choices=tuple(BLOCKS), help="one block (default: all, in this order)")
    parser.add_argument("--list", action="store_true", help="print the runs, run nothing")
    parser.add_argument("--targets", action="store_true", help="print the times to target of final and desk")
    parser.add_argument("overrides", nargs="*", help="key=value for every run that changes no result")
    given = parser.parse_intermixed_args(arguments)
    blocks = [given.block] if given.block else list(BLOCKS)
    try:
        for block in blocks:
            if given.targets:
                show_targets(block)
            elif given.list:
                show(block)
            elif code := run(block, given.overrides):
                return code
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show_targets(block: str) -> None:
    """Print how long each method takes to the losses of the strongest baseline, if the block is one of those."""
    path = RESULTS / f"evidence_{block}.csv"
    if block not in ("final", "desk") or not path.is_file():
        return
    ours = OURS.replace("-", " on ")
    for dataset, table in runs(path).groupby("dataset"):
        for column in ("val_loss", "train_loss"):
            found = time_to_target(table, ours=ours, column=column)
            print(f"{block}, {dataset}: to a {column} of {found.attrs['target']:.4g}")
            print(found.to_string(float_format="{:.3g}".format) + "\n")


def show(block: str) -> None:
    """Print the runs of a block."""
    datasets, scale, count = BLOCKS[block]
    print(f"{block}: {scale} scale, {len(datasets) * count} runs, {len(results(block))} done")
    for dataset in datasets:
        try:
            jobs = planned(block, dataset)
        except InputError as error:
            print(f"  {error}")
            continue
        missing = [words for words in jobs if key(words) not in results(block)]
        print(f"  {dataset}: {len(missing)} of {len(jobs)} missing")
        if missing:
            print(f"    python train.py {shlex.join(command(block, dataset, missing[:1]))}")


if __name__ == "__main__":
    raise SystemExit(main())
