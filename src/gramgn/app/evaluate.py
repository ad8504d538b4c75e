"""Evaluation of a run's network on a split of the data it was trained on."""

from __future__ import annotations

from typing import Any

from gramgn.app.trained import Trained
from gramgn.errors import DataError
from gramgn.training import evaluate


def evaluate_run(trained: Trained, split: str, *, root: str | None = None) -> dict[str, Any]:
    """Evaluate a network on a split, as training does after an epoch.

    Args:
        trained: The network.
        split: `"train"`, `"val"` or `"test"`.
        root: Folder of the raw data, where that has moved; None for the recorded one.

    Returns:
        `split`, `n` (number of samples), `loss` (mean squared error of standardised targets), `mae` (mean absolute
        error, in `unit`), `unit`, `data` and `kind` (of the data set), `checkpoint`, `epoch` (whole epochs of
        training) and `recorded` (loss and mae in metrics.csv for that epoch; None where there are none).

    Raises:
        DataError: There is no data, or it is not the data that the run was trained on.
    """
    loaded = trained.dataset(root).load(trained.settings.image_size)
    before = trained.run["dataset"].get("manifest_sha256")
    if loaded.manifest_sha256 != before:
        raise DataError(
            f"the data set {loaded.name} is not the one that the run was trained on (manifest "
            f"{loaded.manifest_sha256[:12]}, then {str(before)[:12]}): its images, targets or splits differ, and "
            "a split here may hold images of the training. Put the old data back, or give its folder with "
            "dataset.root=<folder>"
        )
    data, size = trained.tensors(loaded), trained.settings.eval_batch_size
    errors = evaluate(trained.model, data, split, batch_size=size, between=lambda: None)
    row: dict[str, Any] = dict(trained.row() or {})
    # What is recorded of the training split are running means over an epoch.
    recorded = None if split == "train" else (row.get(f"{split}_loss"), row.get(f"{split}_mae"))
    return {
        "split": split,
        "n": data.size(split),
        "loss": errors.loss,
        "mae": errors.mae,
        "unit": loaded.unit,
        "data": loaded.name,
        "kind": loaded.kind,
        "checkpoint": trained.place,
        "epoch": trained.epoch,
        "recorded": None if recorded is None or None in recorded else recorded,
    }
