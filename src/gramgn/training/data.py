"""A data set as the training loop sees it: one array on the device, batches by index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gramgn.errors import DataError
from gramgn.training.config import TrainerConfig

SPLITS = ("train", "val", "test")
CHUNK = 4096


@dataclass(frozen=True)
class Scaling:
    """The means that were subtracted and the deviations divided by, all from the training split.

    Attributes:
        target_mean: In the data's unit; 0 without standardisation.
        target_std: In the data's unit; 1 without standardisation.
        pixel_mean: [C] in grey levels of 0 to 255; empty for data other than uint8 images.
        pixel_std: [C], likewise.
    """

    target_mean: float
    target_std: float
    pixel_mean: list[float]
    pixel_std: list[float]


class TensorData:
    """Images (or feature vectors) and standardised targets on the device.

    Args:
        images: uint8 [N, C, H, W], or floating point [N, ...].
        targets: [N] in the data's unit.
        split: [N] of `"train"`, `"val"` or `"test"`.
        channels: Number of channels that the network takes; a single stored channel is repeated for each batch.
        device: The network's device. The array is kept there too if it takes at most half of the free memory.
        dtype: Of the batches.
        standardize_targets: Subtract the training split's mean and divide by its sd.

    Attributes:
        memory_format: Of the batches; always contiguous for data other than images.

    Raises:
        DataError: A split is empty, a target is not finite, the training targets are all equal, or the
            stored channels do not fit `channels`.
    """

    @classmethod
    def of(cls, loaded: Any, config: TrainerConfig, device: torch.device) -> TensorData:
        """Return a loaded data set (`RegressionData`) as training with this configuration sees it."""
        return cls(
            loaded.images,
            loaded.targets,
            loaded.split,
            channels=loaded.channels,
            device=device,
            dtype=getattr(torch, config.dtype),
            standardize_targets=config.standardize_targets,
        )

    def __init__(
        self,
        images: np.ndarray,
        targets: np.ndarray,
        split: np.ndarray,
        *,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
        standardize_targets: bool,
    ) -> None:
        _check_arrays(images, targets, split)
        self.device, self.dtype, self.channels = device, dtype, channels
        self.memory_format = torch.contiguous_format
        self.is_image = images.dtype == np.uint8
        if self.is_image and images.shape[1] not in (1, channels):
            raise DataError(
                f"the images have {images.shape[1]} channels, dataset.channels asks for {channels}; "
                f"only one channel can be repeated"
            )
        rows = {name: np.flatnonzero(split == name) for name in SPLITS}
        fits = device.type != "cuda" or images.nbytes <= torch.cuda.mem_get_info(device)[0] // 2
        store = device if fits else torch.device("cpu")
        # Each split is copied once, directly from the memory map, so that no second whole copy exists.
        self._images = {name: torch.from_numpy(images[rows[name]]).to(store) for name in SPLITS}
        self.scaling = self._fit_scaling(targets[rows["train"]], standardize_targets)
        scaled = (targets - self.scaling.target_mean) / self.scaling.target_std
        self._targets = {name: torch.from_numpy(scaled[rows[name]]).to(device, dtype) for name in SPLITS}
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(self.scaling.pixel_mean, dtype=dtype, device=device).reshape(shape)
        self._std = torch.tensor(self.scaling.pixel_std, dtype=dtype, device=device).reshape(shape)

    def _fit_scaling(self, train_targets: np.ndarray, standardize: bool) -> Scaling:
        mean, std = (float(train_targets.mean()), float(train_targets.std())) if standardize else (0.0, 1.0)
        if std == 0.0:
            raise DataError(
                f"all {len(train_targets)} training targets equal {mean}: there is nothing to learn and no "
                "scale to divide by; check the labels, or set trainer.standardize_targets=false"
            )
        if not self.is_image:
            return Scaling(mean, std, [], [])
        pixel_mean, pixel_std = pixel_statistics(self._images["train"])
        return Scaling(mean, std, pixel_mean, pixel_std)

    def size(self, split: str) -> int:
        """Return the number of samples in a split."""
        return len(self._targets[split])

    def batch(
        self,
        split: str,
        index: torch.Tensor | slice,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [b, channels, H, W] (normalised) and standardised targets [b].

        Args:
            split: `"train"`, `"val"` or `"test"`.
            index: Places [b] in the split.
            change: Applied to the images as stored, before they are normalised; None leaves them as they are.
        """
        stored = self._images[split]
        images = stored[index.to(stored.device) if isinstance(index, torch.Tensor) else index]
        if change is not None:
            images = change(images)
        # The memory format is changed by the conversion, at no extra cost.
        inputs = images.to(self.device, self.dtype, memory_format=self.memory_format)
        if self.is_image:
            inputs = (inputs - self._mean) / self._std
            if inputs.shape[1] != self.channels:
                inputs = inputs.expand(-1, self.channels, -1, -1)
                inputs = inputs.contiguous(memory_format=self.memory_format)
        targets = self._targets[split]
        return inputs, targets[index.to(self.device) if isinstance(index, torch.Tensor) else index]


def pixel_statistics(images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel of uint8 images [N, C, H, W], in grey levels.

    Sums of integers, so the result does not depend on the chunks or the device. A constant channel gets 1.
    """
    count = images.shape[0] * images.shape[2] * images.shape[3]
    total, squares = torch.zeros(2, images.shape[1], dtype=torch.int64)
    for chunk in images.split(CHUNK):
        whole = chunk.to(torch.int64)
        total += whole.sum(dim=(0, 2, 3)).cpu()
        squares += whole.square().sum(dim=(0, 2, 3)).cpu()
    mean = total.double() / count
    std = (squares.double() / count - mean.square()).clamp_min(0).sqrt()
    return mean.tolist(), [float(value) if value > 0 else 1.0 for value in std]


def _check_arrays(images: np.ndarray, targets: np.ndarray, split: np.ndarray) -> None:
    if not len(images) == len(targets) == len(split):
        raise DataError(
            f"{len(images)} images, {len(targets)} targets and {len(split)} split entries were given: "
            "the three numbers must be equal"
        )
    if targets.ndim != 1:
        raise DataError(f"targets must have shape [N], one number per sample, not {list(targets.shape)}")
    bad = np.flatnonzero(~np.isfinite(targets))
    if len(bad):
        raise DataError(f"{len(bad)} targets are not finite numbers, the first at row {bad[0]}")
    for name in SPLITS:
        if not np.any(split == name):
            raise DataError(
                f"the {name} split is empty ({len(split)} samples in all); "
                "use more images (dataset.limit, dataset.num_images) or another dataset.split_seed"
            )
