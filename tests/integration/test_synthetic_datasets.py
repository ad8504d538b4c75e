"""The synthetic data sets: drawn on first use and read by the code that reads the real ones."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gramgn.data import AFAD, RSNA, ImageDataset, RegressionData
from gramgn.errors import ConfigError, DataError
from gramgn.synthetic import AFADSynthetic, RSNASynthetic

CLASSES = {"rsna": RSNASynthetic, "afad": AFADSynthetic}


def synthetic(kind: str, base: Path, **options: Any) -> ImageDataset:
    options = {"num_images": 60, "workers": 1, **options}
    return CLASSES[kind](base / "raw", prepared_root=base / "prepared", **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which both sets are drawn once."""
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def loaded(base: Path) -> dict[str, RegressionData]:
    return {kind: synthetic(kind, base / kind).load(16) for kind in CLASSES}


def test_sets_are_drawn_prepared_and_called_synthetic(loaded: dict[str, RegressionData]) -> None:
    hands, faces = loaded["rsna"], loaded["afad"]
    assert (hands.name, hands.kind, hands.unit) == ("rsna_synthetic", "synthetic", "months")
    assert (faces.name, faces.kind, faces.unit) == ("afad_synthetic", "synthetic", "years")
    assert hands.images.shape == (60, 1, 16, 16)
    assert faces.images.shape == (60, 3, 16, 16)
    assert hands.channels == faces.channels == 3
    for data in (hands, faces):
        assert set(data.split) == {"train", "val", "test"}
        assert data.images.std() > 5
    assert hands.targets.min() >= 1
    assert hands.targets.max() <= 228
    assert faces.targets.min() >= 18
    assert faces.targets.max() <= 39


def test_stray_files_are_left_out_and_reported(base: Path, loaded: dict[str, RegressionData]) -> None:
    """D04: Thumbs.db, .DS_Store and lists are no data; the marker of synthetic data is not reported."""
    for listed in base.rglob("unused.csv"):
        assert "synthetic.json" not in listed.read_text()
    for data in loaded.values():
        assert sum(data.summary["unused"].values()) >= 2
        assert len(data.keys) == 60


def test_targets_are_those_of_the_label_table(base: Path, loaded: dict[str, RegressionData]) -> None:
    rows = (base / "rsna" / "raw" / "n60-seed0" / "boneage-training-dataset.csv").read_text().split()[1:]
    table = {row.split(",")[0]: float(row.split(",")[1]) for row in rows}
    hands = loaded["rsna"]
    assert dict(zip(hands.keys.tolist(), hands.targets.tolist(), strict=True)) == table


def test_photos_of_a_person_stay_on_one_side(tmp_path: Path) -> None:
    """D10: people with several photos do not cross the splits."""
    data = synthetic("afad", tmp_path, num_images=250).load(8)
    sides: dict[str, set[str]] = defaultdict(set)
    photos: dict[str, int] = defaultdict(int)
    for key, split in zip(data.keys.tolist(), data.split.tolist(), strict=True):
        person = key.split("/")[-1].split("-")[0]
        sides[person].add(split)
        photos[person] += 1
    assert max(photos.values()) >= 2
    assert all(len(found) == 1 for found in sides.values())


@pytest.mark.parametrize(("kind", "plain"), [("rsna", RSNA), ("afad", AFAD)])
def test_the_real_class_reads_a_drawn_set_and_still_calls_it_synthetic(
    kind: str, plain: type[ImageDataset], base: Path, loaded: dict[str, RegressionData]
) -> None:
    root = base / kind / "raw" / "n60-seed0"
    data = plain(root, prepared_root=base / "plain", workers=1).load(16)  # type: ignore[call-arg]
    assert data.kind == "synthetic"
    np.testing.assert_array_equal(data.images, loaded[kind].images)
    np.testing.assert_array_equal(data.targets, loaded[kind].targets)


@pytest.mark.parametrize("kind", CLASSES)
def test_check_passes_without_raw_data_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    synthetic(kind, tmp_path).check(64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", CLASSES)
def test_check_refuses_a_folder_that_holds_something_else(kind: str, tmp_path: Path) -> None:
    (tmp_path / "raw" / "n60-seed0").mkdir(parents=True)
    with pytest.raises(DataError, match="Remove or rename"):
        synthetic(kind, tmp_path).check(64)


def test_every_option_that_changes_the_bytes_has_its_own_folder(tmp_path: Path) -> None:
    variants: list[ImageDataset] = [
        synthetic("afad", tmp_path),
        synthetic("afad", tmp_path, seed=1),
        synthetic("afad", tmp_path, num_images=61),
        synthetic("afad", tmp_path, apparent_age_sd=0.0),
        synthetic("afad", tmp_path, apparent_age_sd=5.0000001),
    ]
    assert len({dataset.root for dataset in variants}) == len(variants)
    assert len({dataset.prepared_folder(16) for dataset in variants}) == len(variants)
    assert variants[0].root == tmp_path / "raw" / "n60-seed0"


def test_full_means_as_many_as_the_real_set(tmp_path: Path) -> None:
    assert synthetic("rsna", tmp_path, num_images="full").root.name == "n12611-seed0"
    assert synthetic("afad", tmp_path, num_images="full").root.name == "n59344-seed0"


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("num_images", 0, "1 to 500,000, or full"),
        ("num_images", "ful", "or full"),
        ("num_images", 2.5, "or full"),
        ("num_images", True, "or full"),
        ("seed", -1, "seed"),
        ("seed", "x", "seed"),
        ("num_image", 5, "num_images"),
        ("workers", 0, "workers"),
    ],
)
def test_wrong_options_are_rejected(kind: str, option: str, value: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        synthetic(kind, tmp_path, **{option: value})


@pytest.mark.parametrize(("kind", "option"), [("rsna", "reader_sd"), ("afad", "apparent_age_sd")])
def test_noise_must_be_a_sensible_number(kind: str, option: str, tmp_path: Path) -> None:
    for value in (-1.0, float("nan"), "5"):
        with pytest.raises(ConfigError, match=option):
            synthetic(kind, tmp_path, **{option: value})


def test_the_marker_tells_all_that_decides_the_bytes(base: Path, loaded: dict[str, RegressionData]) -> None:
    assert json.loads((base / "afad" / "raw" / "n60-seed0" / "synthetic.json").read_text()) == {
        "kind": "synthetic",
        "generator": "afad_synthetic",
        "version": 1,
        "num_images": 60,
        "seed": 0,
        "apparent_age_sd": 5.0,
    }
    assert loaded["afad"].summary["settings"]["stand_in"]["seed"] == 0


def test_the_command_shown_gives_the_same_set(tmp_path: Path) -> None:
    dataset = synthetic("rsna", tmp_path / "with space", seed=4, reader_sd=6.0)
    command = dataset.command(32)
    assert f"'dataset.root={tmp_path / 'with space' / 'raw'}'" in command
    for word in (
        "dataset=rsna_synthetic",
        "dataset.num_images=60",
        "dataset.seed=4",
        "dataset.reader_sd=6.0",
    ):
        assert word in command.split()
    assert command.endswith("image_size=32")
