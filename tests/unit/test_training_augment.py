"""Augmentation: functions of (seed, epoch, index), batched, the same as torchvision's on single images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode, functional

from gramgn.data import RSNA, RetinaMNIST, Rotation
from gramgn.errors import ConfigError
from gramgn.training import Augmentation, AugmentConfig

SIDE, COUNT = 16, 40
ALL = AugmentConfig(flip=True, crop=0.125, rotate=15.0)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (COUNT, 3, SIDE, SIDE), dtype=np.uint8))


def changed(
    images: torch.Tensor, index: torch.Tensor, *, config: AugmentConfig = ALL, seed: int = 3, epoch: int = 2
) -> torch.Tensor:
    return Augmentation(config, seed=seed, num_samples=COUNT)(images[index], index, epoch)


def test_each_image_is_changed_whatever_its_batch(images: torch.Tensor) -> None:
    """T10: the same for any order and batch size, after a resume, and whatever else drew numbers."""
    whole = changed(images, torch.arange(COUNT))
    torch.rand(5)
    order = torch.randperm(COUNT)
    for part in order.split(7):
        assert torch.equal(changed(images, part), whole[part])
    augment = Augmentation(ALL, seed=3, num_samples=COUNT)
    augment(images, torch.arange(COUNT), 1)
    assert torch.equal(augment(images, torch.arange(COUNT), 2), whole)


def test_epochs_and_seeds_differ(images: torch.Tensor) -> None:
    index = torch.arange(COUNT)
    one = changed(images, index)
    assert not torch.equal(one, changed(images, index, epoch=3))
    assert not torch.equal(one, changed(images, index, seed=4))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_batch_equals_torchvision_on_single_images(images: torch.Tensor, channels: int) -> None:
    index = torch.arange(COUNT)
    images = images[:, :channels]
    numbers = Augmentation(ALL, seed=3, num_samples=COUNT).numbers(2).tolist()
    found = changed(images, index)
    for image, (mirror, down, right, angle), got in zip(images, numbers, found, strict=True):
        expected = functional.horizontal_flip(image) if mirror < 0.5 else image
        expected = functional.pad(expected, 2)
        expected = functional.crop(expected, int(down * 5), int(right * 5), SIDE, SIDE)
        degrees = (2 * angle - 1) * 15.0
        expected = functional.rotate(expected, degrees, InterpolationMode.BILINEAR)
        assert got.dtype == torch.uint8
        assert int((got.int() - expected.int()).abs().max()) <= 1  # of 255: interpolation rounds


def test_all_draws_occur_about_equally_often() -> None:
    numbers = Augmentation(ALL, seed=0, num_samples=5000).numbers(1)
    assert torch.all((numbers >= 0) & (numbers < 1))
    assert torch.allclose(numbers.mean(dim=0), torch.full((4,), 0.5), atol=0.03)
    assert set((numbers[:, 1] * 5).long().tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "options", [{"flip": 1}, {"crop": 0.5}, {"crop": True}, {"rotate": 90}, {"rotate": "x"}]
)
def test_values_out_of_range_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"augment.{name}="):
        AugmentConfig(**options)


def test_a_data_set_states_what_keeps_its_labels() -> None:
    """A mirrored or turned image of `rotation` would have a wrong label."""
    for dataset in (RSNA, RetinaMNIST):
        ALL.check(dataset.augmentations, "eyes or hands")
    AugmentConfig(crop=0.1).check(Rotation.augmentations, "rotation")
    AugmentConfig().check((), "vectors")
    for config in (AugmentConfig(flip=True), AugmentConfig(rotate=5.0)):
        with pytest.raises(
            ConfigError, match=r"augment\.(flip|rotate): the data set rotation keeps .* crop only"
        ):
            config.check(Rotation.augmentations, "rotation")
