"""The order of the data, its scaling, and its way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gramgn.errors import DataError
from gramgn.training import TensorData, epoch_order


def make(
    images: np.ndarray | None = None, targets: Any = None, split: Any = None, **options: Any
) -> TensorData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 1, 4, 4), dtype=np.uint8) if images is None else images
    targets = np.arange(len(images), dtype=float) if targets is None else np.asarray(targets, float)
    split = np.array(["train"] * 6 + ["val"] * 2 + ["test"] * 2) if split is None else np.asarray(split)
    settings = {
        "channels": 3,
        "device": torch.device("cpu"),
        "dtype": torch.float64,
        "standardize_targets": True,
    }
    return TensorData(images, targets, split, **(settings | options))


def test_order_is_a_function_of_seed_and_epoch() -> None:
    """T10: bitwise the same between runs, different between epochs and seeds, whatever else drew numbers."""
    first = epoch_order(50, seed=3, epoch=2, order="shuffle")
    torch.rand(7)
    assert torch.equal(first, epoch_order(50, seed=3, epoch=2, order="shuffle"))
    assert not torch.equal(first, epoch_order(50, seed=3, epoch=3, order="shuffle"))
    assert not torch.equal(first, epoch_order(50, seed=4, epoch=2, order="shuffle"))
    assert sorted(first.tolist()) == list(range(50))


def test_cyclic_order_never_changes() -> None:
    for epoch in (1, 2, 9):
        assert epoch_order(5, seed=epoch, epoch=epoch, order="cyclic").tolist() == [0, 1, 2, 3, 4]


def test_scaling_comes_from_the_training_split_only() -> None:
    """T09: mean and sd of the training targets; val and test do not touch them."""
    data = make(targets=[0, 2, 4, 6, 8, 10, 1000, 2000, 3000, -5])
    assert data.scaling.target_mean == 5.0
    assert data.scaling.target_std == pytest.approx(np.std([0, 2, 4, 6, 8, 10]))
    _, targets = data.batch("val", slice(0, 2))
    assert targets.tolist() == pytest.approx(
        [(1000 - 5) / np.std([0, 2, 4, 6, 8, 10]), 1995 / np.std([0, 2, 4, 6, 8, 10])]
    )


def test_pixels_are_normalised_with_the_training_split() -> None:
    data = make()
    inputs, _ = data.batch("train", slice(0, 6))
    assert float(inputs.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(inputs.std(correction=0)) == pytest.approx(1.0)


def test_one_channel_is_repeated() -> None:
    """D07: the network sees dataset.channels channels, equal ones for grey."""
    inputs, _ = make().batch("train", torch.tensor([3, 0]))
    assert inputs.shape == (2, 3, 4, 4)
    assert torch.equal(inputs[:, 0], inputs[:, 2])


def test_wrong_channels_are_rejected() -> None:
    """D07: two channels cannot become three."""
    with pytest.raises(DataError, match=r"have 2 channels, dataset\.channels asks for 3"):
        make(images=np.zeros((10, 2, 4, 4), np.uint8))


def test_batches_by_index_match_the_arrays() -> None:
    images = np.arange(10 * 16, dtype=np.uint8).reshape(10, 1, 4, 4)
    data = make(images=images, channels=1, standardize_targets=False)
    inputs, targets = data.batch("train", torch.tensor([4, 1]))
    back = inputs * data._std + data._mean
    assert back.round().to(torch.uint8).numpy().tolist() == images[[4, 1]].tolist()
    assert targets.tolist() == [4.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": ["train"] * 8 + ["val"] * 2}, "the test split is empty"),
        ({"targets": [1.0] * 10}, "all 6 training targets equal 1.0"),
        (
            {"targets": [0, 1, np.nan, 3, 4, 5, 6, 7, 8, 9]},
            "1 targets are not finite numbers, the first at row 2",
        ),
        ({"split": ["train"] * 9}, "numbers must be equal"),
        ({"targets": np.zeros((10, 1))}, "must have shape"),
    ],
)
def test_unusable_arrays_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**change)


def test_feature_vectors_pass_through() -> None:
    """A user's own data may be floating features: they are neither normalised nor repeated."""
    features = np.linspace(0, 1, 30).reshape(10, 3).astype(np.float32)
    inputs, _ = make(images=features).batch("train", slice(0, 6))
    assert inputs.numpy() == pytest.approx(features[:6])


@pytest.mark.parametrize("stored_channels", [1, 3])
def test_batches_in_channels_last_hold_the_same_numbers(stored_channels: int) -> None:
    images = np.random.default_rng(2).integers(0, 256, (10, stored_channels, 4, 4), dtype=np.uint8)
    data = make(images)
    for index in (slice(1, 4), torch.tensor([4, 0, 2])):
        contiguous, _ = data.batch("train", index)
        data.memory_format = torch.channels_last
        inputs, _ = data.batch("train", index)
        data.memory_format = torch.contiguous_format
        assert torch.equal(inputs, contiguous)
        assert contiguous.is_contiguous()
        assert inputs.is_contiguous(memory_format=torch.channels_last)
