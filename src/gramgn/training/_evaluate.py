"""Evaluation: the loss and the mean absolute error over a whole split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from gramgn.training._data import TensorData
from gramgn.training._steps import residuals


@dataclass(frozen=True)
class Evaluation:
    """A split's figures.

    Attributes:
        loss: Mean squared error in standardised units.
        mae: Mean absolute error in the data's unit.
    """

    loss: float
    mae: float


def evaluate(
    model: nn.Module, data: TensorData, split: str, *, batch_size: int, between: Callable[[], None]
) -> Evaluation:
    """Evaluate ``model`` on a split, in evaluation mode and without gradients; the mode is put back.

    Args:
        model: The network.
        data: The data set.
        split: ``"train"``, ``"val"`` or ``"test"``.
        batch_size: Samples at a time.
        between: Called between batches; may raise to stop.
    """
    was_training = model.training
    model.eval()
    squared = absolute = 0.0
    try:
        with torch.no_grad():
            for start in range(0, data.size(split), batch_size):
                residual = residuals(model, *data.batch(split, slice(start, start + batch_size)))
                squared += float(residual.square().sum())
                absolute += float(residual.abs().sum())
                between()
    finally:
        model.train(was_training)
    count = data.size(split)
    return Evaluation(loss=squared / count, mae=absolute / count * data.scaling.target_std)
