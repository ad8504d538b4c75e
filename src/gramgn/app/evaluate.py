"""Evaluation of a run's network on a split of the data it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gramgn.app.trained import Trained
from gramgn.errors import DataError


@dataclass(frozen=True)
class Result:
    """The errors of a network on a split.

    Attributes:
        split: `"train"`, `"val"` or `"test"`.
        n: Number of samples in it.
        loss: Mean squared error in standardised units.
        mae: Mean absolute error in `unit`.
        unit: Of the targets.
        data: Name of the data set.
        kind: `"real"` or `"synthetic"`.
        checkpoint: Which weights.
        epoch: Whole epochs that they were trained for.
        recorded: Loss and mae in metrics.csv for that epoch; None where there are none.
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
        split: `"train"`, `"val"` or `"test"`.
        root: Folder of the raw data, where that has moved; None for the recorded one.

    Raises:
        DataError: There is no data, or it is not the data that the run was trained on.
    """
    data = trained.dataset(root).load(trained.settings.image_size)
    before = trained.run["dataset"].get("manifest_sha256")
    if data.manifest_sha256 != before:
        raise DataError(
            f"the data set {data.name} is not the one that the run was trained on (manifest "
            f"{data.manifest_sha256[:12]}, then {str(before)[:12]}): its images, targets or splits are others, and "
            "a split here may hold images of the training. Put the old data back, or give its folder with "
            "dataset.root=<folder>"
        )
    rows = np.flatnonzero(data.split == split)
    if not len(rows):
        raise DataError(f"the {split} split of {data.name} is empty")
    squared = absolute = 0.0
    for start in range(0, len(rows), trained.settings.eval_batch_size):
        batch = rows[start : start + trained.settings.eval_batch_size]
        outputs = trained.outputs(data.images[batch], data.channels)
        residual = outputs - trained.standardised(data.targets[batch])
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


def _recorded(trained: Trained, split: str) -> tuple[float, float] | None:
    """Return what was measured when the weights were saved; the training split has only running means."""
    row: dict[str, Any] = dict(trained.row() or {})
    loss, mae = row.get(f"{split}_loss"), row.get(f"{split}_mae")
    return None if split == "train" or loss is None or mae is None else (loss, mae)
