"""Real images, where they are at hand."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from gramgn.data import RSNA, RetinaMNIST, Rotation


def test_original_radiographs(shared_data: Path, tmp_path: Path) -> None:
    """D14: eight originals of up to 2,570 pixels, grey, labels joined."""
    data = RSNA(shared_data / "rsna_sample", prepared_root=tmp_path, workers=1).load(64)
    with (shared_data / "rsna_sample" / "boneage-training-dataset.csv").open(newline="") as stream:
        labels = {row["id"]: float(row["boneage"]) for row in csv.DictReader(stream)}
    assert dict(zip(data.keys, data.targets, strict=True)) == labels
    assert (data.images.shape, data.kind) == ((8, 1, 64, 64), "real")
    assert all(image.std() > 10 for image in data.images)


def test_published_retinamnist(shared_data: Path, tmp_path: Path) -> None:
    """The published file is recognised, and its splits are 1,080, 120 and 400."""
    dataset = RetinaMNIST(shared_data / "retinamnist.npz", prepared_root=tmp_path)
    assert dataset.index().facts["published"] is True
    data = dataset.load(28)
    assert [int((data.split == split).sum()) for split in ("train", "val", "test")] == [1080, 120, 400]
    assert set(data.targets) == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_rotated_hands(shared_data: Path, tmp_path: Path) -> None:
    """4,000 radiographs, grey stored once, split 80/10/10, angles over the whole range."""
    data = Rotation(shared_data / "mednist_hands.npz", prepared_root=tmp_path, limit=500).load(16)
    assert data.images.shape == (500, 1, 16, 16)
    assert data.summary["counts"]["total"] == 4000
    assert abs(data.summary["counts"]["test"] - 400) < 60
    assert np.ptp(data.targets) > 80
    assert np.asarray(data.images)[:, :, 0, 0].max() == 0
