"""AFAD's layout: nesting, strays, persons, duplicates."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import picture, write_afad

from gramgn.data import AFAD, RegressionData
from gramgn.errors import DataError


def afad(root: Path, **options: Any) -> AFAD:
    """Return the data set with its prepared folder beside the root."""
    return AFAD(root, **{"prepared_root": root.parent / "prepared", "workers": 1, **options})


def manifest(data: RegressionData, dataset: AFAD, size: int = 16) -> str:
    """Return the manifest's text."""
    assert data.summary["prepared"] == dataset.prepared_folder(size).name
    return (dataset.prepared_folder(size) / "manifest.csv").read_text()


def test_labels_come_from_folders(tmp_path: Path) -> None:
    """D07: RGB faces come out as one array, ages as numbers, read-only."""
    photos = write_afad(tmp_path / "raw" / "AFAD-Lite")
    data = afad(tmp_path / "raw").load(16)
    assert (data.name, data.kind, data.unit, data.channels) == ("afad", "real", "years", 3)
    assert (data.images.shape, data.images.dtype) == ((len(photos), 3, 16, 16), np.uint8)
    assert list(data.keys) == sorted(photos)
    assert list(data.targets) == [float(photo.split("/")[0]) for photo in sorted(photos)]
    with pytest.raises(ValueError, match="read-only"):
        data.images[0, 0, 0, 0] = 1
    assert data.summary["counts"]["total"] == len(photos)


def test_grey_on_request(tmp_path: Path) -> None:
    """D07: the channel count is an option."""
    write_afad(tmp_path / "raw", 5)
    assert afad(tmp_path / "raw", channels=1).load(16).images.shape[1] == 1


@pytest.mark.parametrize("nesting", ["AFAD-Lite/18", "18", "AFAD-Lite/AFAD-Lite/18", "other/18"])
def test_extra_levels_are_accepted(tmp_path: Path, nesting: str) -> None:
    """D01: the folder, its parent, and one level too many are the same data set."""
    base = (tmp_path / "raw" / nesting).parent
    photos = write_afad(base, 6)
    dataset = afad(tmp_path / "raw")
    dataset.check(16)
    assert [item.key for item in sorted(dataset.index().items, key=lambda item: item.key)] == sorted(photos)
    assert dataset.load(16).images.shape[0] == len(photos)


def test_nesting_does_not_make_another_data_set(tmp_path: Path) -> None:
    """D11: moved files, touched files, another depth: the same samples and split."""
    write_afad(tmp_path / "one" / "raw" / "AFAD-Lite")
    write_afad(tmp_path / "two" / "raw", reverse=True)
    shutil.move(tmp_path / "two", tmp_path / "three")
    for path in (tmp_path / "three").rglob("*.jpg"):
        path.touch()
    first, second = (afad(tmp_path / name / "raw").load(16) for name in ("one", "three"))
    assert first.manifest_sha256 == second.manifest_sha256
    assert list(first.split) == list(second.split)
    assert (first.images == second.images).all()


@pytest.mark.parametrize("content", ["nothing", "no folder", "empty", "loose", "strings", "a file"])
def test_no_faces_is_an_error_before_any_work(tmp_path: Path, content: str) -> None:
    """D01: the message names the folder searched, the layout, what was found, and what to do."""
    root = tmp_path / "raw"
    if content == "a file":
        root.write_text("x")
    elif content != "no folder":
        root.mkdir()
    if content == "empty":
        (root / "18" / "111").mkdir(parents=True)
    if content == "loose":
        picture(0).save(root / "1-0.jpg")
    if content == "strings":
        write_afad(root / "eighteen", 3)
        shutil.rmtree(root)
        (root / "eighteen" / "111").mkdir(parents=True)
    dataset = afad(root)
    for action in (dataset.check, dataset.load, dataset.prepare):
        with pytest.raises(DataError) as error:
            action(16)
        message = str(error.value)
        assert str(root) in message
        assert "found there: " in message
        for part in (
            "AFAD-Lite/<age",
            "afad-dataset.github.io",
            "prepare_data.py dataset=afad",
            "afad_synthetic",
        ):
            assert part in message
    assert not (tmp_path / "prepared").exists() or not list((tmp_path / "prepared").glob("afad*"))


def test_both_variants_are_told_apart(tmp_path: Path) -> None:
    """D01: with Lite and Full in one folder the variant decides; two Lites are an error that names them."""
    write_afad(tmp_path / "raw" / "AFAD-Lite", 3)
    write_afad(tmp_path / "raw" / "AFAD-Full", 9)
    assert len(afad(tmp_path / "raw").index().items) == 4
    assert len(afad(tmp_path / "raw", variant="full").index().items) == 12
    (tmp_path / "raw" / "AFAD-Lite").rename(tmp_path / "raw" / "a")
    (tmp_path / "raw" / "AFAD-Full").rename(tmp_path / "raw" / "b")
    with pytest.raises(DataError, match="several sets of age folders"):
        afad(tmp_path / "raw").index()


def test_system_files_are_ignored_at_every_level(tmp_path: Path) -> None:
    """D04: hidden and system files are no samples; every file left out is reported with its reason."""
    photos = write_afad(tmp_path / "raw", 6)
    image = (tmp_path / "raw" / photos[0]).read_bytes()
    age, sex = photos[0].split("/")[:2]
    for level in ("", age, f"{age}/{sex}"):
        folder = tmp_path / "raw" / level
        for name in (".hidden.jpg", "Thumbs.db", "desktop.ini", "._1-0.jpg", ".DS_Store"):
            (folder / name).write_bytes(image)
        (folder / "__MACOSX" / "18" / "111").mkdir(parents=True)
        (folder / "__MACOSX" / "18" / "111" / "5-0.jpg").write_bytes(image)
    (tmp_path / "raw" / "AFAD-Lite.txt").write_text("list")
    (tmp_path / "raw" / "nineteen").mkdir()
    (tmp_path / "raw" / age / "113").mkdir()
    (tmp_path / "raw" / age / sex / "portrait.jpg").write_bytes(image)
    dataset = afad(tmp_path / "raw")
    data = dataset.load(16)
    assert list(data.keys) == sorted(photos)
    assert data.summary["unused"] == {
        "system or hidden file": 18,
        "not in an age folder": 1,
        "folder name is not an age in whole years": 1,
        "not in a folder 111 (male) or 112 (female)": 1,
        "name is not <person>-<k>.jpg": 1,
    }
    assert len((dataset.prepared_folder(16) / "unused.csv").read_text().splitlines()) == 1 + 22


def test_a_person_is_on_one_side(tmp_path: Path) -> None:
    """D10: all photos of a person, over ages, are in one split."""
    write_afad(tmp_path / "raw", 120)
    data = afad(tmp_path / "raw").load(16)
    sides = defaultdict(set)
    for key, split in zip(data.keys, data.split, strict=True):
        sides[key.split("/")[2].split("-")[0]].add(split)
    assert len(sides) == 120
    assert all(len(split) == 1 for split in sides.values())
    assert set(data.split) == {"train", "val", "test"}


def test_equal_bytes_never_cross_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D10: copies under new names, persons and ages stay with the original and are reported."""
    photos = write_afad(tmp_path / "raw", 90)
    for number, photo in enumerate(photos[:30]):
        age = 18 + (int(photo[:2]) - 18 + number) % 22
        copy = tmp_path / "raw" / str(age) / "111" / f"{90000 + number}-0.jpg"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "raw" / photo, copy)
    dataset = afad(tmp_path / "raw")
    data = dataset.load(16)
    rows = [line.split(",") for line in manifest(data, dataset).splitlines()[1:]]
    sides = defaultdict(set)
    for row in rows:
        sides[row[2]].add(row[6])
    assert len(sides) == len(photos)
    assert all(len(split) == 1 for split in sides.values())
    equal = data.summary["duplicates"]
    assert (equal["samples"], equal["sets_of_equal_bytes"]) == (60, 30)
    assert 0 < equal["with_different_targets"] < 30
    assert "60 samples are copies" in capsys.readouterr().err


def test_max_age_and_ages_that_lite_has_not(tmp_path: Path) -> None:
    photos = write_afad(tmp_path / "raw", 10)
    (tmp_path / "raw" / "72" / "111").mkdir(parents=True)
    picture(1).save(tmp_path / "raw" / "72" / "111" / "5-0.jpg")
    index = afad(tmp_path / "raw").index()
    assert len(index.items) == len(photos) + 1
    assert "72" in index.notes[0]
    index = afad(tmp_path / "raw", max_age=39).index()
    assert (len(index.items), index.notes) == (len(photos), [])
    assert [entry.reason for entry in index.unused] == ["older than max_age=39"]


@pytest.mark.parametrize("variant", ["lite", "full"])
def test_ages_that_cannot_be_right_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    """By row, with the reason; an option sets another range, and the set that it makes has its own folder."""
    photos = write_afad(tmp_path / "raw", 10)
    for number, age in enumerate((0, 73, 200, 999)):
        (tmp_path / "raw" / str(age) / "111").mkdir(parents=True)
        picture(number).save(tmp_path / "raw" / str(age) / "111" / f"{number}-0.jpg")
    dataset = afad(tmp_path / "raw", variant=variant)
    assert sorted(dataset.load(16).keys) == sorted([*photos, "73/111/1-0.jpg"])
    err = capsys.readouterr().err
    assert "3 x target outside 1 to 110 years (dataset.target_range) (0/111/0-0.jpg, 200/" in err
    assert f"found (0, 73, 200, 999): AFAD-{variant.capitalize()} has none" in err
    assert "999/111/3-0.jpg,target outside" in (dataset.prepared_folder(16) / "unused.csv").read_text()
    assert (
        len(afad(tmp_path / "raw", variant=variant, target_range=[0, 999]).load(16).keys) == len(photos) + 4
    )
    assert len(afad(tmp_path / "raw", variant=variant, target_range=[30, 32]).load(16).keys) < len(photos)
    with pytest.raises(DataError, match=r"all \d+ targets are outside 120 to 150 years, e\.g\. 0 of 0/111"):
        afad(tmp_path / "raw", variant=variant, target_range=[120, 150]).load(16)


def test_limit_takes_the_same_samples_everywhere(tmp_path: Path) -> None:
    """D11: a limit chooses by key and seed, and leaves the split alone."""
    write_afad(tmp_path / "raw", 40)
    full, limited = afad(tmp_path / "raw").load(16), afad(tmp_path / "raw", limit=20).load(16)
    assert len(limited.keys) == len(limited.images) == len(limited.targets) == 20
    assert list(limited.keys) == sorted(limited.keys)
    place = {key: position for position, key in enumerate(full.keys)}
    for position, key in enumerate(limited.keys):
        assert limited.split[position] == full.split[place[key]]
        assert (limited.images[position] == full.images[place[key]]).all()
    smaller = afad(tmp_path / "raw", limit=10).load(16)
    assert set(smaller.keys) < set(limited.keys)
    assert len(afad(tmp_path / "raw", limit=10_000).load(16).keys) == len(full.keys)


@pytest.mark.parametrize("level", ["inside", "above", "below"])
def test_a_drawn_set_is_called_synthetic(tmp_path: Path, level: str) -> None:
    """A real layout class pointed at a drawn set reports what it is."""
    write_afad(tmp_path / "raw" / "AFAD-Lite", 4)
    root = {"inside": "raw", "above": "raw/AFAD-Lite", "below": "."}[level]
    assert afad(tmp_path / root).kind == "real"
    (tmp_path / "raw" / "synthetic.json").write_text("{}")
    dataset = AFAD(tmp_path / root, prepared_root=tmp_path / "p", workers=1)
    assert dataset.kind == dataset.load(16).kind == "synthetic"
