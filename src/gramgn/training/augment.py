"""Augmentation: training images mirrored, shifted and turned at random, each as a function of (seed, epoch, index)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gramgn.errors import ConfigError, is_number

MAX_ANGLE = 90.0


@dataclass(frozen=True)
class AugmentConfig:
    """How training images are changed (`conf/augment/`); validation and test images never are.

    Attributes:
        flip: Mirror an image left to right with probability 1/2; default False.
        crop: Shift an image by up to this share of its side in both directions, in whole pixels, and fill with black,
            in [0, 0.5); default 0.
        rotate: Turn an image by up to this number of degrees either way and fill with black, in [0, 90); default 0.

    Raises:
        ConfigError: A value is out of range; the message names all of them.
    """

    flip: bool = False
    crop: float = 0.0
    rotate: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        flip: object = self.flip
        if not isinstance(flip, bool):
            problems.append(f"augment.flip={self.flip!r} must be true or false")
        if not is_number(self.crop, 0, 0.5):
            problems.append(
                f"augment.crop={self.crop!r} must be a share of the side, at least 0 and below 0.5"
            )
        if not is_number(self.rotate, 0, MAX_ANGLE):
            problems.append(
                f"augment.rotate={self.rotate!r} must be degrees, at least 0 and below {MAX_ANGLE:g}"
            )
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def used(self) -> list[str]:
        """Names of the changes that are switched on."""
        return [field.name for field in fields(self) if getattr(self, field.name)]

    def check(self, valid: Collection[str], name: str) -> None:
        """Check the changes against those that keep the labels of a data set.

        Args:
            valid: The names of those.
            name: Name of the data set, for the message.

        Raises:
            ConfigError: One of the changes would make labels wrong, or the data set does not state that it keeps them.
        """
        if wrong := [each for each in self.used if each not in valid]:
            raise ConfigError(
                f"augment.{wrong[0]}: the data set {name} keeps its labels under {', '.join(valid) or 'no change'} "
                "only, as its attribute 'augmentations' states. Use augment=none, or switch that off"
            )


class Augmentation:
    """Changes batches of training images by random numbers that are a function of (seed, epoch, index).

    torchvision's transforms draw one number per call, for the whole batch, from the global generator. Here each image
    has its own numbers, and what torchvision does to single images is done to the batch at once.

    Args:
        config: Which changes, and how large.
        seed: The run's seed.
        num_samples: Number of samples in the training split.
    """

    def __init__(self, config: AugmentConfig, *, seed: int, num_samples: int) -> None:
        self.config, self._seed, self._num_samples = config, seed, num_samples
        self._epoch, self._numbers = 0, torch.empty(0)

    def numbers(self, epoch: int) -> Tensor:
        """Return [n, 4] uniform numbers in [0, 1) for an epoch: of the mirror, the shift down and right, the angle."""
        digest = hashlib.sha256(f"augment:{self._seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.rand(self._num_samples, 4, generator=generator)

    def __call__(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """Return changed images of the same shape.

        Args:
            images: uint8 [b, C, H, W].
            index: Their places [b] in the training split.
            epoch: The epoch, counted from 1.
        """
        if epoch != self._epoch:
            self._epoch, self._numbers = epoch, self.numbers(epoch)
        mirror, down, right, angle = self._numbers[index.cpu()].to(images.device).unbind(1)
        if self.config.flip:
            images = flipped(images, mirror < 0.5)
        if reach := round(self.config.crop * images.shape[-1]):
            images = shifted(images, reach, (down * (2 * reach + 1)).long(), (right * (2 * reach + 1)).long())
        if self.config.rotate:
            images = turned(images, (2 * angle - 1) * self.config.rotate)
        return images


def flipped(images: Tensor, chosen: Tensor) -> Tensor:
    """Return images [b, C, H, W] with the chosen ones [b] mirrored left to right."""
    from torchvision.transforms.v2 import functional  # slow to import, and of no use to other runs

    return torch.where(chosen[:, None, None, None], functional.horizontal_flip(images), images)


def shifted(images: Tensor, reach: int, top: Tensor, left: Tensor) -> Tensor:
    """Return windows of images [b, C, H, W] with a black margin of `reach` pixels, at `top` and `left` [b]."""
    from torchvision.transforms.v2 import functional

    windows = functional.pad(images, reach).unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def turned(images: Tensor, degrees: Tensor) -> Tensor:
    """Return uint8 images [b, C, H, W], each turned counter-clockwise by its angle [b], interpolated bilinearly."""
    height, width = images.shape[2:]
    radians = degrees * (math.pi / 180)
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    rows = torch.stack((cos, -sin * height / width, zero, sin * width / height, cos, zero), dim=1)
    grid = torch.nn.functional.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    sampled = torch.nn.functional.grid_sample(images.float(), grid, align_corners=False)
    return sampled.round().clamp(0, 255).to(images.dtype)
