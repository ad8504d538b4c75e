"""Run folders for the tests of the report, made without training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gramgn.records import RunFolder

HOSTILE = "<img src=x onerror=document.title='attacked'>"


def add_run(
    path: Path,
    losses: Sequence[float],
    *,
    optimizer: str = "ggn",
    model: str = "resnet_fixup",
    data: str = "afad_synthetic",
    kind: str = "synthetic",
    seed: int = 0,
    state: str = "done",
    epochs: int | None = None,
    settings: dict[str, Any] | None = None,
    choices: dict[str, Any] | None = None,
    **entries: Any,
) -> RunFolder:
    """Write a run with these training losses; test losses are twice as large."""
    folder = RunFolder.create(path)
    folder.write_run(
        {
            "id": "00ff",
            "state": state,
            "error": None,
            "choices": {
                "dataset": data, "model": model, "optimizer": optimizer, "trainer": "laptop", **(choices or {})
            },
            "dataset": {
                "name": data, "kind": kind, "unit": "years", "image_size": 32, "manifest_sha256": "ab" * 32,
                "summary": {"used": 2560, "counts": {"train": 2000, "val": 260, "test": 300}},
            },
            "optimizer": {"name": optimizer, "lam": 1.0, "damping_convention": "mean", "alpha_sum": 38.4},
            "model": {"name": model},
            "config": {
                "seed": seed,
                "optimizer": {"lr": 1.0, "lam": 1.0, "alpha": 0.3, "damping_convention": "mean", **(settings or {})},
                "model": {"depth": 14},
                "trainer": {
                    "epochs": epochs or len(losses), "scale": "laptop", "batch_size": 128, "standardize_targets": True
                },
            },
            "overrides": [f"optimizer={optimizer}", f"seed={seed}"],
            "seed": seed,
            "git": {"commit": "c0ffee" + "0" * 34, "dirty": False, "diff_sha256": None},
            "versions": {"gramgn": "0.1.0", "python": "3.11.7", "torch": "2.14.1"},
            "device": {"kind": "cpu", "name": "Abacus 2000"},
            "threads": 2,
            "starts": [{"time_utc": "2026-01-01T00:00:00Z", "platform": "Linux x86_64"}],
            **entries,
        }
    )  # fmt: skip
    for epoch, loss in enumerate(losses, start=1):
        row: dict[str, float | int] = {
            "epoch": epoch,
            "step": 16 * epoch,
            "train_s": 2.0 * epoch,
            "train_loss": loss,
        }
        row |= {"val_loss": 3 * loss, "test_loss": 2 * loss, "train_mae": 9 * loss, "test_mae": 10 * loss}
        folder.append_metrics({**row, "solve_cholesky": 15, "solve_eigh": 1, "peak_mem_mib": 700.0})
    return folder


def add_paper(root: Path, *, seeds: int = 3, epochs: int = 10) -> int:
    """Write runs as the paper's chain leaves them: the curves of figures 1 and 2, and the grid; return their number."""
    count = 0
    for data in ("afad", "rsna"):
        for place, (optimizer, model, name) in enumerate(_CURVES):
            for seed in range(seeds):
                losses = [(2 + place) / (epoch + 1 + 0.1 * seed) for epoch in range(epochs)]
                choices = {"experiment": name.format(data=data)}
                path = root / "sweeps" / f"paper-{data}" / f"{optimizer}-{model}-{seed}"
                add_run(
                    path,
                    losses,
                    optimizer=optimizer,
                    model=model,
                    data=f"{data}_synthetic",
                    seed=seed,
                    choices=choices,
                )
                count += 1
    for lam in (0.25, 0.5, 1.0, 2.0, 4.0):
        for alpha in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
            count += 1
            _grid_cell(root / "sweeps" / "lambda_alpha" / f"lam{lam}-alpha{alpha}", lam, alpha, epochs)
    return count


_CURVES = (
    ("sgd", "resnet_bn", "fig1/{data}_sgd_bn"),
    ("sgd", "resnet_fixup", "fig1/{data}_sgd_fixup"),
    ("ggn", "resnet_fixup", "fig1/{data}_ggn_fixup"),
    ("ggn_spring", "resnet_gn", "ours/{data}_ggn_spring_gn"),
)


def _grid_cell(path: Path, lam: float, alpha: float, epochs: int) -> None:
    choices = {"experiment": "fig2/rsna_ggn_fixup", "sweep": "lambda_alpha"}
    losses = [
        1.0 / (epoch + 1) + abs(math.log(lam)) + 0.1 * abs(math.log10(alpha)) for epoch in range(epochs)
    ]
    diverges = lam < 0.5
    add_run(
        path,
        [2.0, math.nan] if diverges else losses,
        data="rsna_synthetic",
        state="diverged" if diverges else "done",
        epochs=epochs,
        settings={"lam": lam, "alpha": alpha},
        choices=choices,
    )
