"""Made-up results files of scripts/evidence.py, with losses that depend on method, budget and seed."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from gramgn.records import override_key, runs, short_hash, write_results

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
UNITS = {"rotation": "degrees", "retinamnist": "grade", "rsna_synthetic": "months", "afad_synthetic": "years"}
LEVEL = {"ggn_recommended": 0.04, "ggn_spring": 0.05, "adamw": 0.06, "muon": 0.08, "sgd": 0.1, "ggn": 0.2}


def script(name: str) -> ModuleType:
    """Return a fresh copy of a module in scripts/, which other scripts import from then on."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_rows(evidence: ModuleType, block: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of one run: training loss falls geometrically to a level that longer budgets lower."""
    given = dict(word.split("=", 1) for word in words)
    epochs, dataset = int(given["trainer.epochs"]), given["dataset"]
    size = int(given.get("trainer.batch_size", 128))
    is_ggn = given["optimizer"].startswith("ggn")
    random_ = random.Random(" ".join(words))
    end = LEVEL[given["optimizer"]] * (1 + 8 / epochs) * (1.2 if "schedule=constant" in words else 1.0)
    end *= random_.uniform(0.97, 1.03) * (1.3 if given["model"] == "resnet_gn" and not is_ggn else 1.0)
    same = [word for word in words if override_key(word) not in ("trainer.epochs", "seed")]
    common = {
        "run": f"evidence-{block}-{dataset}/x-{evidence.key(words)}",
        "state": "done",
        "seed": int(given["seed"]),
        "dataset": dataset,
        "kind": "synthetic" if dataset.endswith("synthetic") else "real",
        "unit": UNITS[dataset],
        "image_size": 32,
        "num_images": 2560,
        "scale": given["trainer"],
        "standardized": "trainer.standardize_targets=false" not in words,
        "model": given["model"],
        "depth": 14,
        "optimizer": given["optimizer"],
        "lam": float(given.get("optimizer.lam", 1)) if is_ggn else None,
        "alpha": float(given.get("optimizer.alpha", 0.1)) if is_ggn else None,
        "damping_convention": given.get("optimizer.damping_convention", "mean") if is_ggn else None,
        "epochs": epochs,
        "batch_size": size,
        "threads": 1,
        "device_kind": "cpu",
        "device": "Abacus 2000",
        "other_settings": short_hash(same),
        "git": "c0ffee000000",
        "torch": "2.0",
        "kernels": "avx512" if is_ggn else None,
    }
    slower = (1.5 if is_ggn else 1.0) * (1 + 0.1 * int(given["seed"]))
    rows = []
    for epoch in range(1, epochs + 1):
        loss = 1.2 * (end / 1.2) ** (epoch / epochs)
        test = None if block in evidence.BLIND else 1.3 * loss
        rows.append(
            common
            | {"epoch": epoch, "step": 16 * epoch, "train_s": slower * (0.4 + epoch)}
            | {"train_loss": loss, "train_mae": 10 * loss, "val_loss": 1.25 * loss, "val_mae": 12 * loss}
            | {"test_loss": test, "test_mae": None if test is None else 10 * test}
        )
    return rows


def write_block(evidence: ModuleType, block: str, **changes: float) -> None:
    """Write a block's file. `changes` are factors of the losses by optimizer."""
    rows = []
    for dataset in evidence.BLOCKS[block][0]:
        for words in evidence.planned(block, dataset):
            rows += run_rows(evidence, block, words)
    table = pd.DataFrame(rows).reindex(columns=runs().columns).astype(runs().dtypes)
    for optimizer, factor in changes.items():
        columns = ["train_loss", "val_loss", "val_mae", "test_loss", "test_mae"]
        table.loc[table["optimizer"] == optimizer, columns] *= factor
    write_results(table, evidence.RESULTS / f"evidence_{block}.csv")
