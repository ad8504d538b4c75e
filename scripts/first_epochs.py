"""Measure GGN step by step: why it stands still and overshoots at first, what helps, and what limits it later.

python scripts/first_epochs.py                  # the runs that are missing: about 10 minutes of one idle core
python scripts/first_epochs_page.py             # tables and figure of docs/first_epochs.md from them, see there

The rows, one per step, are kept in outputs/results/first_epochs.csv after every run; runs that it holds are not
repeated. Real images lie in data/raw/rotation (one .npz file). Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import (  # noqa: E402
    Job,
    compose_config,
    plain,
    register_resolvers,
    report_errors,
    run_entries,
    set_repository,
)
from gramgn.progress import say  # noqa: E402
from gramgn.records import git_state, processor_name, write_atomic  # noqa: E402

RESULTS = ROOT / "outputs" / "results" / "first_epochs.csv"

TRACE = "optimizer.damping_convention=trace optimizer.alpha=0.1"
BOUND = "optimizer.max_step_norm=0.3"
# What differs from `optimizer=ggn model=resnet_fixup`, as overrides of `train.py`.
VARIANTS = {
    "plain": "",
    "last layer not zero": "model.zero_last_layer=false",
    "adaptive damping": "optimizer=ggn_lm",
    "bound": BOUND,
    "trace": TRACE,
    "trace + bound": f"{TRACE} {BOUND}",
    "trace + bound + SPRING": f"{TRACE} {BOUND} optimizer.momentum=0.9",
}
# As tuned for all lengths on turned radiographs, see docs/results.md.
TUNED = "tuned"
SETTING = "optimizer=ggn_spring model=resnet_gn optimizer.alpha=2.4"
DATASETS = ("rsna_synthetic", "rotation", "afad_synthetic")
EPOCHS = 4
LONGER = {("rsna_synthetic", "plain"): 8, ("rotation", TUNED): 18}
SEEDS = (0, 1)
ONCE = ("last layer not zero", "adaptive damping", "bound")
EVERYWHERE = ("plain", "trace + bound + SPRING")

Row = dict[str, Any]


def plan() -> Iterator[tuple[str, str, int]]:
    """Yield data set, variant and seed of every run: all variants on synthetic bone age, two on the other sets."""
    yield "rotation", TUNED, SEEDS[0]
    for seed in SEEDS:
        for dataset in DATASETS:
            for variant in VARIANTS if dataset == "rsna_synthetic" else EVERYWHERE:
                if seed == SEEDS[0] or variant not in ONCE:
                    yield dataset, variant, seed


def overrides(dataset: str, variant: str, seed: int) -> list[str]:
    """Return the command line of `train.py` that takes the same steps."""
    words = (SETTING if variant == TUNED else VARIANTS[variant]).split()
    parts = {"optimizer": "ggn", "model": "resnet_fixup"} | dict(word.split("=") for word in words)
    epochs = LONGER.get((dataset, variant), EPOCHS)
    return [
        f"dataset={dataset}",
        "trainer=laptop",
        f"trainer.epochs={epochs}",
        "trainer.threads=1",
        *(f"{key}={value}" for key, value in parts.items()),
        f"seed={seed}",
        "tracking=none",
    ]


def measure(words: list[str]) -> Iterator[Row]:
    """Train as `train.py` with these overrides does, and yield what each step saw and did."""
    from gramgn.app import build_parts
    from gramgn.training import Stepper, TensorData, epoch_order, use_channels_last

    config = run_entries(plain(compose_config(words)))
    parts = build_parts(Job(config, {}, words, ROOT))
    model, trainer = parts.model, parts.config
    loaded = parts.dataset.load(trainer.image_size)
    data = TensorData.of(loaded, trainer, parts.device)
    use_channels_last(model, data, say)
    stepper, size = Stepper(model, parts.optimizer), data.size("train")
    step = 0
    for epoch in range(1, trainer.epochs + 1):
        order = epoch_order(size, seed=config["seed"], epoch=epoch, order=trainer.order)
        for index in order.split(trainer.batch_size_for(size)):
            step += 1
            inputs, targets = data.batch("train", index)
            yield {"step": step, "epoch": epoch, **diagnose(stepper, inputs, targets)}


def diagnose(stepper: Any, inputs: Any, targets: Any) -> Row:
    """Take one step and return its statistics; costs one more forward pass and an eigendecomposition."""
    import torch

    from gramgn.training import residuals

    model = stepper.model
    features: list[Any] = []
    hook = model.last.register_forward_pre_hook(lambda _, arguments: features.append(arguments[0].detach()))
    before = [param.detach().clone() for param in model.parameters()]
    info = stepper(inputs, targets).info
    hook.remove()
    with torch.no_grad():
        after = residuals(model, inputs, targets).double()
    moved = [param.detach() - old for param, old in zip(model.parameters(), before, strict=True)]
    r, h = info.residual.double(), features[0].double()
    eigenvalues, vectors = torch.linalg.eigh(info.gram)
    shares = (vectors.T @ r).square() / r.square().sum()
    resolved = info.lam * eigenvalues > info.alpha_sum
    tolerance = len(r) * torch.finfo(torch.float32).eps * eigenvalues[-1]
    return {
        "b": info.num_samples,
        "loss": info.loss,
        "loss_after": float(after.square().mean()),
        "predicted_decrease": info.predicted_decrease,
        "common_after": float(after.mean().square() / after.square().mean()),
        "step_norm": info.step_norm,
        "moved": sum(bool(each.any()) for each in moved),
        "tensors": len(moved),
        "alpha_sum": info.alpha_sum,
        "mean_eigenvalue": info.trace / len(r),
        "lambda_1": float(eigenvalues[-1]),
        "lambda_2": float(eigenvalues[-2]),
        "rank": int((eigenvalues > tolerance).sum()),
        "resolved": int(resolved.sum()),
        "resolved_share": float(shares[resolved].sum()),
        # The columns of J that belong to the last layer are the features and 1.
        "last_share": float(h.square().sum() + len(h)) / info.trace,
        "features": float(h.square().sum(dim=1).mean().sqrt()),
        "rejected": info.rejected,
    }


def run(missing: Sequence[tuple[str, str, int]]) -> None:
    """Measure runs and add each to the results file when it is complete."""
    import torch

    from gramgn.optim import kernels

    git = git_state(ROOT)
    for number, (dataset, variant, seed) in enumerate(missing, start=1):
        say(f"{number} of {len(missing)}: {dataset}, {variant}, seed {seed}")
        provenance = {
            "commit": git["commit"],
            "git_diff": (git["diff_sha256"] or "")[:12],
            "processor": processor_name(),
            "threads": 1,
            "kernels": kernels.choose("auto"),
            "torch": torch.__version__,
        }
        names = {"dataset": dataset, "variant": variant, "seed": seed}
        found = [{**names, **row, **provenance} for row in measure(overrides(dataset, variant, seed))]
        write([*read(), *found])


def write(rows: Sequence[Row]) -> None:
    """Write the results file: six significant digits."""
    lines = [",".join(rows[0])]
    lines += [
        ",".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row.values())
        for row in rows
    ]
    write_atomic(RESULTS, "\n".join(lines) + "\n")


def read() -> list[Row]:
    """Return the rows of the results file, numbers as numbers; none if there is no file yet."""
    if not RESULTS.is_file():
        return []
    texts = {"dataset", "variant", "commit", "git_diff", "processor", "kernels", "torch"}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [
            {name: cell if name in texts else number(cell) for name, cell in row.items()}
            for row in csv.DictReader(file)
        ]


def number(cell: str) -> int | float:
    """Return a cell as a number, whole where it is written so."""
    return int(cell) if cell.lstrip("-").isdigit() else float(cell)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    set_repository(ROOT)
    register_resolvers()
    there = {(row["dataset"], row["variant"], row["seed"]) for row in read()}
    return report_errors(lambda: run([each for each in plan() if each not in there]))


if __name__ == "__main__":
    raise SystemExit(main())
