"""Somebody else's network that needs contiguous images, one of odd parameters, and data that are no images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from outside import Blobs
from torch import Tensor, nn

from gramgn.data import RegressionData


class ViewNet(nn.Module):
    """Flattens with ``view``, which channels-last activations do not allow."""

    def __init__(self, channels: int = 3, dropout: float = 0.0, outputs: str = "flat"):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, stride=4)
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x))
        return self.last(x.view(len(x), -1)).squeeze(-1)


class DeepNet(nn.Module):
    """A kernel between two others, dropout, and a parameter of five dimensions."""

    def __init__(self, channels: int = 3, dropout: float = 0.0, outputs: str = "flat"):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(72, 1),
        )
        self.odd = nn.Parameter(torch.ones(1, 1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x)[:, :, None, None, None] * self.odd).flatten()


class VectorNet(nn.Module):
    """Two layers on vectors of 5 numbers."""

    def __init__(self, channels: int = 3, dropout: float = 0.0, outputs: str = "flat"):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(-1)


class Vectors(Blobs):
    """Vectors of 5 numbers; the target is their sum."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        del self.channels  # not asked for: there are no channels

    def load(self, image_size: int) -> RegressionData:
        vectors = np.random.default_rng(self.seed).normal(size=(self.num_images, 5)).astype(np.float32)
        split = np.array(["train", "train", "train", "train", "train", "train", "val", "test"])
        return RegressionData(
            name="vectors",
            kind="synthetic",
            unit="-",
            images=vectors,
            targets=vectors.sum(axis=1).astype(np.float64),
            split=np.resize(split, self.num_images),
            keys=np.arange(self.num_images).astype(str),
            channels=5,
            manifest_sha256=f"{self.seed:064x}",
            summary={},
        )


class FrozenNet(nn.Module):
    """Its normalisation and its dropout are frozen by their author, and whatever else there is on request."""

    def __init__(self, channels: int = 3, dropout: float = 0.0, outputs: str = "flat"):
        super().__init__()
        norm, drop = nn.BatchNorm2d(4), nn.Dropout(0.9)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=4), norm, nn.Tanh(), drop, nn.Flatten(), nn.Linear(64, 1)
        )
        (self if outputs == "all frozen" else nn.ModuleList([norm, drop])).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(-1)
