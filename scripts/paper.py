"""Run the paper's experiments, figures 1a to 2c: a list of sweeps, each of which the same command completes.

python scripts/paper.py                               # laptop scale, synthetic data: about an hour on two cores
python scripts/paper.py --scale paper --data real     # full size, AFAD-LITE and RSNA: for a GPU
python scripts/paper.py --list                        # the sweeps, their commands and how far each is
python scripts/paper.py tracking=none                 # overrides for every sweep

Real data lie in data/raw/afad and data/raw/rsna (links will do). The chain may be stopped or killed at any time.
Exit codes: 0 all done, 1 a job failed or a sweep was left out, 2 bad input, 130 and 143 stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import train_command  # noqa: E402
from gramgn.progress import say  # noqa: E402
from gramgn.records import SweepFolder, count_states, find_runs  # noqa: E402

SWEEPS = ROOT / "outputs" / "sweeps"
# Epochs of a curve and of a cell of figure 2c's grid, and the grid's number of seeds.
SCALES = {"debug": (2, 2, 1), "laptop": (20, 10, 3), "desk": (30, 10, 1), "paper": (30, 10, 1)}
SEEDS = (0, 1, 2)
GRID, CURVES = "lambda_alpha", "lambda_alpha_curves"
# Name of a sweep: its panels, what it runs, its data set, and the sweep whose networks it starts from.
STEPS = {
    "afad_ggn_fixup": ("1a 1b", "experiment=fig1/afad_ggn_fixup", "afad", None),
    "afad_sgd_bn": ("1a 1b", "experiment=fig1/afad_sgd_bn", "afad", None),
    "afad_sgd_fixup": ("1a 1b", "experiment=fig1/afad_sgd_fixup", "afad", None),
    "afad_ggn_spring_gn": ("1a 1b", "experiment=ours/afad_ggn_spring_gn", "afad", None),
    "rsna_ggn_fixup": ("1c 1d 2a", "experiment=fig1/rsna_ggn_fixup", "rsna", "afad_ggn_fixup"),
    "rsna_sgd_bn": ("1c 1d 2a", "experiment=fig1/rsna_sgd_bn", "rsna", "afad_sgd_bn"),
    "rsna_sgd_fixup": ("1c 1d 2a", "experiment=fig1/rsna_sgd_fixup", "rsna", "afad_ggn_fixup"),
    "rsna_ggn_spring_gn": ("1c 1d 2a", "experiment=ours/rsna_ggn_spring_gn", "rsna", "afad_ggn_spring_gn"),
    GRID: ("2c", f"sweep={GRID}", "rsna", "afad_ggn_fixup"),
    CURVES: ("2b", f"sweep={CURVES}", "rsna", "afad_ggn_fixup"),
}


def command(name: str, scale: str, data: str, seeds: Sequence[int]) -> list[str]:
    """Return the arguments of train.py for a sweep."""
    _, choice, dataset, start = STEPS[name]
    epochs, grid_epochs, _ = SCALES[scale]
    words = ["-m", choice, f"dataset={dataset}{'' if data == 'real' else '_synthetic'}", f"trainer={scale}"]
    words += [
        f"trainer.epochs={grid_epochs if name == GRID else epochs}",
        f"seed={','.join(map(str, seeds))}",
    ]
    if name == GRID and scale != "paper":
        words.append(f"dataset.limit={100 if scale == 'debug' else 512}")
    if data == "synthetic" and scale == "paper":
        words.append("dataset.num_images=full")
    if start is not None:
        words.append(f"warm_start.sweep=paper-{scale}-{data}-{start}")
    if name == CURVES:
        words.append(f"best_alpha.sweep=paper-{scale}-{data}-{GRID}")
    return [*words, f"name=paper-{scale}-{data}-{name}"]


def planned_seeds(name: str, scale: str) -> Sequence[int]:
    """Return the seeds of a sweep."""
    return SEEDS[: {GRID: SCALES[scale][2], CURVES: 1}.get(name, len(SEEDS))]


def run(steps: Sequence[str], scale: str, data: str, extra: list[str]) -> int:
    """Run the sweeps in order and return the exit code of the whole."""
    worst = 0
    for number, name in enumerate(steps, start=1):
        seeds, start = planned_seeds(name, scale), STEPS[name][3]
        say(f"\n[{number}/{len(steps)}] {name} (figures {STEPS[name][0]})")
        if start is not None:  # nothing starts from a network that diverged or failed
            runs = [each.read_run() for each in find_runs(SWEEPS / f"paper-{scale}-{data}-{start}")]
            trained = {each["seed"] for each in runs if each["state"] == "done"}
            if lost := [seed for seed in seeds if seed not in trained]:
                worst = max(worst, 1)
                say(f"without seed {', '.join(map(str, lost))}: {start} has no finished network of that seed")
            seeds = [seed for seed in seeds if seed in trained]
        if seeds:
            words = [*command(name, scale, data, seeds), *extra]
            say(f"python train.py {shlex.join(words)}")
            code = train_command(words, ROOT)
            if code not in (0, 1):  # bad input would be the same for the others; or stopped
                say("the same command continues where the chain stopped")
                return code
            worst = max(worst, code)
    say("\nsome jobs failed: the same command tries them again" if worst else "\nall sweeps are complete")
    say("draw the figures with: make figures\nwrite the report with: make report")
    return worst


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", default="laptop", choices=tuple(SCALES), help="default: laptop")
    parser.add_argument(
        "--data", default="synthetic", choices=("synthetic", "real"), help="default: synthetic"
    )
    parser.add_argument("--list", action="store_true", help="print the sweeps and their states, run nothing")
    parser.add_argument("overrides", nargs="*", help="key=value for every sweep, as for train.py")
    given = parser.parse_intermixed_args(arguments)
    if not given.list:
        return run(list(STEPS), given.scale, given.data, given.overrides)
    for name in STEPS:
        words = command(name, given.scale, given.data, planned_seeds(name, given.scale))
        sweep = SweepFolder(SWEEPS / words[-1].removeprefix("name="))
        cells = sweep.cells() if sweep.sweep_json.is_file() else []
        states = ", ".join(
            f"{count} {state}" for state, count in count_states(cell.state for cell in cells).items()
        )
        print(f"{name} (figures {STEPS[name][0]}): {states or 'not begun'}")
        print(f"  python train.py {shlex.join([*words, *given.overrides])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
