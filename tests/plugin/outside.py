"""Somebody else's data set, network and optimizer, as they plug in with --config-dir and _target_."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramgn.data import RegressionData
from gramgn.errors import DataError


class Blobs:
    """A bright spot on noise; the target is its height. ``bad`` asks for one of several faults."""

    augmentations = ("flip",)

    def __init__(
        self, num_images: int = 64, channels: int = 3, seed: int = 0, bad: str = "", sleep_s: float = 0
    ):
        self.num_images, self.channels, self.seed, self.bad, self.sleep_s = (
            num_images,
            channels,
            seed,
            bad,
            sleep_s,
        )

    def load(self, image_size: int) -> RegressionData:
        rng = np.random.default_rng(self.seed)
        images = rng.integers(0, 64, (self.num_images, 1, image_size, image_size), dtype=np.uint8)
        rows = rng.integers(2, image_size - 2, self.num_images)
        columns = rng.integers(2, image_size - 2, self.num_images)
        for image, row, column in zip(images, rows, columns, strict=True):
            image[0, row - 2 : row + 2, column - 2 : column + 2] = 255
        targets = rows.astype(np.float64)
        if self.bad == "nan":
            targets[3] = np.nan
        if self.bad == "constant":
            targets[:] = 7.0
        if self.bad == "crash":
            raise RuntimeError("the plug-in's own mistake")
        if self.bad == "rank" and os.environ.get("RANK") == "1":
            raise DataError("these files are not on this machine")
        if self.bad == "memory":
            raise MemoryError(f"{len(np.zeros(1 << 24))} numbers and no room for more")
        if self.bad == "abort":
            os.abort()
        split = np.array(["train", "train", "train", "train", "train", "train", "val", "test"])
        time.sleep(self.sleep_s)
        return RegressionData(
            name="blobs",
            kind="synthetic",
            unit="pixels",
            images=images,
            targets=targets,
            split=np.resize(split, self.num_images),
            keys=np.arange(self.num_images).astype(str),
            channels=self.channels,
            manifest_sha256=f"{self.seed:064x}",
            summary={},
        )


class Telling(Blobs):
    """Prints what the process of the job has of the machine."""

    def load(self, image_size: int) -> RegressionData:
        gpus, first = os.environ.get("CUDA_VISIBLE_DEVICES"), not torch.cuda.is_initialized()
        told, run = os.environ.get("GREETING"), os.environ.get("WANDB_RUN_ID")
        print(f"gpus={gpus} threads={torch.get_num_threads()} clean={first} env={told} run={run}")
        return super().load(image_size)


class TinyNet(nn.Module):
    """Two layers on pooled pixels; ``outputs`` is what its forward returns: flat, column or nan."""

    def __init__(self, channels: int = 3, dropout: float = 0.0, outputs: str = "flat"):
        super().__init__()
        self.body = nn.Sequential(
            nn.AdaptiveAvgPool2d(8),
            nn.Flatten(),
            nn.Linear(channels * 64, 16),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(16, 1),
        )
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if self.outputs == "nan" and self.training:
            out = out / 0.0
        return out if self.outputs == "column" else out.squeeze(-1)


class SlowSGD(torch.optim.SGD):
    """SGD that waits, so that a test can catch a run in the middle of an epoch."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9, sleep_s: float = 0.1):
        super().__init__(params, lr=lr, momentum=momentum)
        self.sleep_s = sleep_s

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        time.sleep(self.sleep_s)
        return super().step(closure)


class Zero(nn.Module):
    """Always predicts the mean of the training targets."""

    def __init__(self, channels: int = 3, dropout: float = 0.0, outputs: str = "flat"):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(dim=1) * self.weight


class FailsOnRank(SlowSGD):
    """Fails in the second step on one of several ranks."""

    def __init__(
        self, params: Any, lr: float = 0.05, momentum: float = 0.9, sleep_s: float = 0.1, rank: int = 1
    ):
        super().__init__(params, lr, momentum, sleep_s)
        self.fails, self.num_steps = os.environ.get("RANK") == str(rank), 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        if self.fails and self.num_steps == 2:
            raise ValueError("the plug-in's own mistake")
        return super().step(closure)
