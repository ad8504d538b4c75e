"""Run the comparison of docs/protocol.md: blocks of sweeps, each of which the same command completes.

python scripts/evidence.py --list               # the blocks, their numbers of runs and how many are missing
python scripts/evidence.py --block tune         # one block
python scripts/evidence.py --block tune --dataset rotation   # its runs on one data set, e.g. one data set per core
python scripts/evidence.py --commands --block tune    # the command of each run by itself
python scripts/evidence.py                      # all of them: about 16 hours of one core

Every run uses one thread. Seconds are reported from the block clock only, which must run alone on an idle machine.
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
from gramgn.records import (  # noqa: E402
    final_loss,
    identifying,
    override_key,
    runs,
    short_hash,
    write_results,
)

SWEEPS, RESULTS = ROOT / "outputs" / "sweeps", ROOT / "outputs" / "results"
REAL, SYNTHETIC = ("rotation", "retinamnist"), ("rsna_synthetic", "afad_synthetic")
# Epochs of a third, half and the whole of the length.
BUDGETS = {"laptop": (6, 9, 18), "desk": (10, 15, 30)}
TUNING_SEED = 100
OURS = "ggn_spring-resnet_gn"
RECIPE = (
    "optimizer=ggn_recommended model=resnet_gn schedule=one_cycle schedule.alpha=0.03 trainer.batch_size=64"
)


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
# A block's data sets, its scale, and its number of runs per data set; those of clock follow from the other blocks.
BLOCKS: dict[str, tuple[tuple[str, ...], str, int | None]] = {
    "tune": ((*REAL, *SYNTHETIC), "laptop", 85),
    "refine": ((*REAL, *SYNTHETIC), "laptop", 24),
    "final": ((*REAL, *SYNTHETIC), "laptop", 65),
    "paper": ((*REAL, *SYNTHETIC), "laptop", 20),
    "desk": (SYNTHETIC, "desk", 21),
    "desk_paper": (SYNTHETIC, "desk", 9),
    "sensitivity": (SYNTHETIC[:1], "laptop", 99),
    "clock": ((*REAL, *SYNTHETIC), "both", None),
}
OURS_AND_RECIPE = (OURS.replace("-", " on "), "ggn_recommended on resnet_gn")
"""The methods that are no baselines, as `time_to_target` names them."""
BLIND = ("tune", "refine")
"""Blocks whose files hold no test losses, so that nothing can be chosen by them."""


def varied(words: str, *overrides: str) -> str:
    """Return the words of a setting with some overrides added or replaced."""
    keys = [override_key(each) for each in overrides]
    return " ".join([*(each for each in words.split() if override_key(each) not in keys), *overrides])


def studies() -> dict[str, dict[str, list[tuple[str, int]]]]:
    """Return the runs of the block sensitivity: settings with seeds, by study and by line of its figure."""
    plain, alpha = PAPER[2], OmegaConf.load(ROOT / "conf" / "optimizer" / "ggn_recommended.yaml").alpha
    in_months = "trainer.standardize_targets=false"

    def over(words: str, *overrides: str, seeds: int = 3) -> list[tuple[str, int]]:
        return [(varied(words, *overrides), seed) for seed in range(seeds)]

    def grid(words: str, unit: float) -> list[tuple[str, int]]:
        alphas = [f"optimizer.alpha={unit * factor:g}" for factor in (0.01, 0.1, 1, 10)]
        lams = [f"optimizer.lam={lam}" for lam in (0.25, 0.5, 1, 2, 4)]
        return [(varied(words, lam, each), 0) for lam in lams for each in alphas]

    def batches(sizes: Sequence[int], *overrides: str) -> list[tuple[str, int]]:
        return [run for size in sizes for run in over(RECIPE, f"trainer.batch_size={size}", *overrides)]

    in_sum = ("optimizer.damping_convention=sum", f"optimizer.alpha={64 * alpha:g}")
    return {
        "grid-plain": {"": grid(plain, 1)},
        "grid-recipe": {"": grid(RECIPE, alpha)},
        "batch": {
            "the same α in the mean": batches((32, 64, 128, 256, 512, 1024)),
            "the same α in the sum": over(RECIPE) + batches((32, 128, 256, 1024), *in_sum),
        },
        "labels": {
            "plain, standardised": over(plain),
            "plain, in months": over(plain, in_months),
            "recipe, standardised": over(RECIPE),
            "recipe, in months": over(RECIPE, in_months),
        },
        "last-layer": {
            "plain, zero": over(plain),
            "plain, random": over(plain, "model.zero_last_layer=false"),
            "recipe, zero": over(RECIPE, "model.zero_last_layer=true"),
            "recipe, random": over(RECIPE),
        },
        "seeds": {"plain": over(plain, seeds=10), "recipe": over(RECIPE, seeds=10)},
    }


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


def digits(run: str) -> str:
    """Return the digits that the name of a run ends with, see `key`."""
    return run.rpartition("-")[2]


def results(block: str) -> dict[str, float]:
    """Return the validation loss after the last epoch of each run in a block's file, by `key`; inf if it diverged."""
    path = RESULTS / f"evidence_{block}.csv"
    return read(path, path.stat().st_mtime_ns) if path.is_file() else {}


@cache
def read(path: Path, mtime_ns: int) -> dict[str, float]:
    """Return the content of a results file as `results` does; `mtime_ns` tells one content from another."""
    ends = final_loss(runs(path), column="val_loss")
    return {digits(run): loss for run, loss in zip(ends["run"], ends["loss"], strict=True)}


def ranked(dataset: str, method: str, epochs: int) -> list[tuple[float, str]]:
    """Return the trials of a method that ran for a number of epochs and their validation losses, the best first.

    Raises:
        InputError: One of them is not in the committed results.
    """
    half = BUDGETS["laptop"][1]
    found = results("tune") if epochs == half else results("refine")
    words = METHODS[method] if epochs == half else [words for _, words in ranked(dataset, method, half)[:2]]
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
    scale = BLOCKS[block][1]
    if block == "clock":
        timed = (each for each in ("final", "paper", "desk", "desk_paper") if dataset in BLOCKS[each][0])
        settings = dict.fromkeys(tuple(words[:-2]) for each in timed for words in planned(each, dataset))
        return [[*setting, "trainer.epochs=2", f"seed={seed}"] for seed in range(3) for setting in settings]
    third, half, whole = lengths = BUDGETS[scale]
    if block == "tune":
        return [job(dataset, scale, each, half, TUNING_SEED) for words in METHODS.values() for each in words]
    if block == "refine":
        two_best = [words for method in METHODS for _, words in ranked(dataset, method, half)[:2]]
        return [job(dataset, scale, words, n, TUNING_SEED) for words in two_best for n in (third, whole)]
    if block == "sensitivity":
        every = [run for lines in studies().values() for line in lines.values() for run in line]
        return [job(dataset, scale, words, third, seed) for words, seed in dict.fromkeys(every)]
    if block in ("paper", "desk_paper"):
        curves, seeds = (PAPER, range(5)) if block == "paper" else (PAPER[:3], range(3))
        return [job(dataset, scale, words, whole, seed) for words in curves for seed in seeds]

    def best(method: str, epochs: int) -> tuple[float, str]:
        return ranked(dataset, method, BUDGETS["laptop"][lengths.index(epochs)])[0]

    lowest = {method: min(best(method, epochs)[0] for epochs in lengths) for method in METHODS}
    first, second = sorted((method for method in METHODS if method != OURS), key=lowest.__getitem__)[:2]
    is_final = block == "final"
    everywhere = [first, OURS] if is_final else [first]
    methods_of = {third: everywhere, half: everywhere, whole: list(METHODS) if is_final else [first, second]}
    return [
        job(dataset, scale, words, epochs, seed)
        for epochs, methods in methods_of.items()
        for words in (*(best(method, epochs)[1] for method in methods), RECIPE)
        for seed in range(5 if is_final else 3)
    ]


def missing(block: str, dataset: str) -> list[list[str]]:
    """Return the planned runs that are not in the block's file."""
    there = results(block)
    return [words for words in planned(block, dataset) if key(words) not in there]


def command(block: str, dataset: str, jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the arguments of train.py for some runs of a block on a data set."""
    points = ",".join(f"'{' '.join(words[1:])}'" for words in jobs)
    common = [f"name=evidence-{block}-{dataset}", jobs[0][0], "trainer.threads=1", "tracking=none"]
    return ["-m", *common, f"hydra.sweeper.points=[{points}]"]


def run(block: str, datasets: Sequence[str], extra: Sequence[str]) -> int:
    """Run what is missing of a block on some of its data sets and return the exit code."""
    worst = 0
    for dataset in datasets:
        number, left = len(planned(block, dataset)), missing(block, dataset)
        say(f"\n{block} on {dataset}: {counted(number, 'run')}, {len(left)} missing")
        if left:
            try:
                code = train_command([*command(block, dataset, left), *extra], ROOT)
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
    parser.add_argument(
        "--dataset", choices=(*REAL, *SYNTHETIC), help="one data set (default: all of a block)"
    )
    parser.add_argument("--list", action="store_true", help="print the blocks, run nothing")
    parser.add_argument("--commands", action="store_true", help="print the command of each run, run nothing")
    parser.add_argument("overrides", nargs="*", help="key=value for every run that changes no result")
    given = parser.parse_intermixed_args(arguments)
    blocks = [given.block] if given.block else list(BLOCKS)
    try:
        for block in blocks:
            datasets = [each for each in BLOCKS[block][0] if given.dataset in (None, each)]
            if given.block and not datasets:
                known = ", ".join(BLOCKS[block][0])
                raise InputError(f"the block {block} has no runs on {given.dataset}; its data sets: {known}")
            if given.commands:
                for words in (words for dataset in datasets for words in planned(block, dataset)):
                    print(f"python train.py {shlex.join(words)} trainer.threads=1 tracking=none")
            elif given.list:
                show(block, datasets)
            elif code := run(block, datasets, given.overrides):
                return code
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(block: str, datasets: Sequence[str]) -> None:
    """Print the runs of a block."""
    _, scale, count = BLOCKS[block]
    number = f"{len(datasets) * count} runs" if count else "every setting of the other blocks three times"
    print(f"{block}: {scale} scale, {number}, {len(results(block))} done")
    for dataset in datasets:
        try:
            print(f"  {dataset}: {len(missing(block, dataset))} of {len(planned(block, dataset))} missing")
        except InputError as error:
            print(f"  {error}")


if __name__ == "__main__":
    raise SystemExit(main())
