"""Evaluating a run's network on a split of the data it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gramgn.app.tools._trained import Trained
from gramgn.errors import DataError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Result:
    """What a network does on a split.

    Attributes:
        split: ``"train"``, ``"val"`` or ``"test"``.
        n: Samples in it.
        loss: Mean squared error in standardised units.
        mae: Mean absolute error in ``unit``.
        unit: Of the targets.
        data: Name of the data set.
        kind: ``"real"`` or ``"synthetic"``.
        checkpoint: Which weights.
        epoch: Whole epochs that they have seen.
        recorded: Loss and mae that metrics.csv has for that epoch; None where it has none.
    """

    split: str
    n: int
    loss: float
    mae: float
    unit: str
    data: str
    kind: str
    checkpoint: str
    epoch: int
    recorded: tuple[float, float] | None


def evaluate_run(trained: Trained, split: str, *, root: str | None = None) -> Result:
    """Evaluate a network on a split, as training does after an epoch.

    Args:
        trained: The network.
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: Folder of the raw data, where that is another one now.

    Raises:
        DataError: There is no data, or it is not the data that the run was trained on.
    """
    data = trained.dataset(root).load(trained.settings.image_size)
    _check_same_data(trained, data)
    rows = np.flatnonzero(data.split == split)
    if not len(rows):
        raise DataError(f"the {split} split of {data.name} is empty")
    squared = absolute = 0.0
    for start in range(0, len(rows), trained.settings.eval_batch_size):
        batch = rows[start : start + trained.settings.eval_batch_size]
        residual = trained.outputs(data.images[batch], data.channels) - trained.standardised(
            data.targets[batch]
        )
        squared += float(residual.square().sum())
        absolute += float(residual.abs().sum())
    return Result(
        split=split,
        n=len(rows),
        loss=squared / len(rows),
        mae=absolute / len(rows) * trained.scaling.target_std,
        unit=data.unit,
        data=data.name,
        kind=data.kind,
        checkpoint=trained.place,
        epoch=trained.epoch,
        recorded=_recorded(trained, split),
    )


def _check_same_data(trained: Trained, data: Any) -> None:
    before = trained.run["dataset"].get("manifest_sha256")
    if data.manifest_sha256 != before:
        raise DataError(
            f"the data set {data.name} is not the one that the run was trained on (manifest "
            f"{data.manifest_sha256[:12]}, then {str(before)[:12]}): its images, targets or splits are others, and "
            "a split here may hold images of the training. Put the old data back, or give its folder with "
            "dataset.root=<folder>"
        )


def _recorded(trained: Trained, split: str) -> tuple[float, float] | None:
    """Return what was measured when the weights were saved; the training split has only running means."""
    if trained.batch or split == "train":
        return None
    for row in trained.folder.read_metrics():
        loss, mae = row[f"{split}_loss"], row[f"{split}_mae"]
        if row["epoch"] == trained.epoch and loss is not None and mae is not None:
            return loss, mae
    return None
