"""Run folders for tests of figures: made-up but plausible numbers, written as the pipeline writes them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gramgn.records import METRIC_COLUMNS, RunFolder

LAMS = (0.25, 0.5, 1, 2, 4)
ALPHAS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
GIT = {"commit": "c0ffee" * 6 + "c0ff", "dirty": False, "diff_sha256": None}
CURVES = {
    "ggn_fixup": ("ggn", "resnet_fixup", "fig1"),
    "sgd_fixup": ("sgd", "resnet_fixup", "fig1"),
    "sgd_bn": ("sgd", "resnet_bn", "fig1"),
    "ggn_spring_gn": ("ggn_spring", "resnet_gn", "ours"),
}


def add_run(
    path: Path,
    losses: Sequence[float],
    *,
    optimizer: str = "ggn",
    model: str = "resnet_fixup",
    seed: int = 0,
    state: str = "done",
    settings: dict[str, Any] | None = None,
    dataset: dict[str, Any] | None = None,
    began: str = "2026-01-01T00:00:00Z",
    seconds: float = 2.0,
    test_losses: Sequence[float] | None = None,
    choices: dict[str, str] | None = None,
    epochs: int | None = None,
    scale: str = "laptop",
    init_from: str | None = None,
    overrides: Sequence[str] = (),
    **entries: Any,
) -> RunFolder:
    """Write a run with these training losses; by default test losses are twice as large, errors ten times."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    record = {
        "format": 1,
        "id": "00ff",
        "state": state,
        "error": None,
        "choices": {"optimizer": optimizer, "model": model, "trainer": scale, **(choices or {})},
        "dataset": {
            "name": "rsna",
            "kind": "real",
            "unit": "months",
            "image_size": 32,
            "manifest_sha256": "ab" * 32,
            "summary": {"used": 2560, "counts": {"train": 2000, "val": 260, "test": 300}},
            **(dataset or {}),
        },
        "optimizer": {"name": optimizer},
        "model": {"name": model},
        "config": {
            "seed": seed,
            "init_from": init_from,
            "model": {"_target_": f"gramgn.models.{model}", "depth": 14},
            "optimizer": {"lr": 1.0, **(settings or {})},
            "trainer": {
                "epochs": epochs or len(losses),
                "scale": scale,
                "standardize_targets": True,
                "batch_size": 128,
            },
        },
        "overrides": list(overrides),
        "seed": seed,
        "device": {"kind": "cpu", "name": "Abacus 2000"},
        "threads": 2,
        "git": GIT,
        "versions": {"gramgn": "0.1.0", "torch": "2.14.1"},
        "starts": [{"time_utc": began, "git": GIT, "platform": "Linux x86_64"}],
        **entries,
    }
    folder.run_json.write_text(json.dumps(record))
    rows = []
    for epoch, loss in enumerate(losses, start=1):
        test = test_losses[epoch - 1] if test_losses is not None else 2 * loss
        row = {"epoch": epoch, "train_s": seconds * epoch, "train_loss": loss, "val_loss": 3 * loss}
        row |= {"test_loss": test, "train_mae": 9 * loss, "test_mae": 10 * loss}
        rows.append({**row, "solve_cholesky": 15, "solve_eigh": 1, "peak_mem_mib": 700.0})
    write_rows(folder, rows)
    return folder


def write_rows(folder: RunFolder, rows: Sequence[dict[str, float]]) -> None:
    """Write the rows of metrics.csv, without the syncing that a real run needs."""
    lines = [",".join(str(row.get(name, "")) for name in METRIC_COLUMNS) for row in rows]
    folder.metrics_csv.write_text("\n".join([",".join(METRIC_COLUMNS), *lines]) + "\n")


def add_paper_runs(
    root: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 20,
    kind: str = "synthetic",
    scale: str = "laptop",
    grid_seeds: Sequence[int] = (0,),
) -> int:
    """Write what `make paper` leaves and return the number of runs; lambda 0.25 has no finite cell up to 30."""
    count = 0
    for family, unit in (("afad", "years"), ("rsna", "months")):
        data = dataset_of(family, kind, unit)
        for name, (optimizer, model, folder) in CURVES.items():
            for seed in seeds:
                add_curve(root, f"{folder}/{family}_{name}", optimizer, model, seed, epochs, data, scale)
                count += 1
    data = dataset_of("rsna", kind, "months")
    count += add_grid(root / "grid", data | {"summary": {"used": 512}}, scale=scale, seeds=grid_seeds)
    for lam, alpha in ((0.25, 300), (1, 1), (4, 0.1), (1, 0.1), (1, 3)):
        run = RunFolder(root / "curves" / f"{lam}-{alpha}")
        rng = random.Random(f"{lam}{alpha}")
        losses = [
            0.9 * math.exp(-0.3 * e / (1 + alpha / 100)) + 0.02 + 0.01 * rng.random() for e in range(epochs)
        ]
        add_run(
            run.path,
            losses,
            settings={"lam": lam, "alpha": alpha, "damping_convention": "mean"},
            dataset=data,
            scale=scale,
            choices={"experiment": "fig2/rsna_ggn_fixup", "sweep": "lambda_alpha_curves"},
        )
        count += 1
    return count


def dataset_of(family: str, kind: str, unit: str) -> dict[str, Any]:
    """Return the `dataset` entry of a run on a data set of the paper."""
    name = family if kind == "real" else f"{family}_synthetic"
    return {"name": name, "kind": kind, "unit": unit, "manifest_sha256": (family * 16)[:64]}


def add_curve(
    root: Path,
    experiment: str,
    optimizer: str,
    model: str,
    seed: int,
    epochs: int,
    data: dict[str, Any],
    scale: str = "laptop",
    **more: Any,
) -> RunFolder:
    """Write a run of one of figure 1's curves."""
    rng = random.Random(f"{experiment}{seed}")
    rate = {"ggn": 0.33, "ggn_spring": 0.45}.get(optimizer, 0.17 if model == "resnet_bn" else 0.02)
    peak = 3.0 if (optimizer, model) == ("ggn", "resnet_fixup") else 0.0
    noise = [math.exp(rng.gauss(0, 0.08)) for _ in range(epochs)]
    losses = [
        (math.exp(-rate * e) + 0.004 + peak * e * math.exp(-1.2 * e)) * each for e, each in enumerate(noise)
    ]
    tests = [max(loss, 0.2) * (1.1 + 0.1 * rng.random()) for loss in losses]
    settings = {"momentum": 0.9, "lr": 0.01}
    if optimizer != "sgd":
        settings = {"lam": 1.0, "alpha": 0.3, "damping_convention": "mean", "lr": 1.0}
    family = experiment.split("/")[1].split("_")[0]
    return add_run(
        root / f"paper-{scale}-{experiment.replace('/', '_')}" / f"seed={seed}",
        losses,
        test_losses=tests,
        optimizer=optimizer,
        model=model,
        seed=seed,
        settings=settings,
        dataset=data,
        seconds=(4.1 if optimizer != "sgd" else 2.6) + 0.1 * rng.random(),
        scale=scale,
        choices={"experiment": experiment},
        init_from=f"outputs/sweeps/afad/seed={seed}" if family == "rsna" else None,
        **more,
    )


def add_grid(
    folder: Path,
    data: dict[str, Any],
    *,
    scale: str = "laptop",
    seeds: Sequence[int] = (0,),
    epochs: int = 10,
    lams: Sequence[float] = LAMS,
    alphas: Sequence[float] = ALPHAS,
) -> int:
    """Write the runs of `sweep=lambda_alpha` and return their number."""
    count = 0
    extension = [(0.25, alpha) for alpha in (100, 300)] if 0.25 in lams else []
    for lam, alpha in [*((lam, alpha) for lam in lams for alpha in alphas), *extension]:
        for seed in seeds:
            diverges = (lam == 0.25 and alpha < 200) or (lam == 0.5 and alpha < 0.1)
            best = 0.3 if lam >= 1 else 10.0
            end = 0.02 * lam * 10 ** (0.5 * abs(math.log10(alpha / best))) * (1 + 0.1 * seed)
            losses = [end ** ((e + 1) / epochs) for e in range(epochs)]
            if diverges:
                losses = [1.0, 50.0, math.nan]
            add_run(
                folder / f"{lam}-{alpha}-{seed}",
                losses,
                seed=seed,
                epochs=epochs,
                state="diverged" if diverges else "done",
                settings={"lam": lam, "alpha": alpha, "damping_convention": "mean"},
                dataset=data,
                scale=scale,
                choices={"experiment": "fig2/rsna_ggn_fixup", "sweep": "lambda_alpha"},
            )
            count += 1
    return count


def add_cell(
    path: Path, loss: float = 0.1, *, lam: float = 1.0, alpha: float = 0.1, **more: Any
) -> RunFolder:
    """Write a cell of the grid that has this loss in all its ten epochs."""
    more.setdefault("losses", [loss] * 10)
    losses = more.pop("losses")
    return add_run(
        path,
        losses,
        settings={"lam": lam, "alpha": alpha, "damping_convention": "mean"},
        dataset=more.pop("dataset", None) or dataset_of("rsna", "synthetic", "months"),
        choices={"experiment": "fig2/rsna_ggn_fixup", "sweep": "lambda_alpha"},
        **more,
    )
