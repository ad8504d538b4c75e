"""The contact sheet: evenly spread samples with their targets, and a command line that answers mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gramgn.data import RegressionData
from gramgn.data.contact_sheet import CAPTION, GAP, TITLE, contact_sheet, save_contact_sheet, spread_by_rank
from gramgn.errors import DataError


def data(images: np.ndarray, kind: str = "real") -> RegressionData:
    """Return a set whose i-th of n images has target n - i."""
    num = len(images)
    return RegressionData(
        name="tiny",
        kind=kind,
        unit="years",
        images=images,
        targets=np.arange(num, 0, -1, dtype=np.float64),
        split=np.array(["train", "val", "test"] * num)[:num],
        keys=np.array([str(index) for index in range(num)]),
        channels=3,
        manifest_sha256="0" * 64,
    )


def flat(levels: list[int], channels: int = 1, side: int = 64) -> np.ndarray:
    """Return images of one grey level each."""
    images = np.empty((len(levels), channels, side, side), np.uint8)
    images[:] = np.array(levels, np.uint8)[:, None, None, None]
    return images


def test_samples_are_spread_evenly_by_rank() -> None:
    targets = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    assert spread_by_rank(targets, 3).tolist() == [1, 4, 0]
    assert spread_by_rank(targets, 99).tolist() == [1, 3, 4, 2, 0]
    assert spread_by_rank(targets, 1).tolist() == [1]


@pytest.mark.parametrize("channels", [1, 3])
def test_tiles_go_from_the_smallest_to_the_largest_target(channels: int) -> None:
    page = np.asarray(contact_sheet(data(flat([10, 90, 170, 250], channels)), columns=4, rows=1))
    levels = [page[TITLE + 30, GAP + 30 + place * (64 + GAP)].tolist() for place in range(4)]
    assert levels == [[level] * 3 for level in (250, 170, 90, 10)]


def test_a_small_set_has_no_empty_rows() -> None:
    assert (
        contact_sheet(data(flat([0] * 5)), columns=4, rows=8).height == TITLE + 2 * (64 + CAPTION + GAP) + GAP
    )


def test_colours_are_kept() -> None:
    image = np.zeros((1, 3, 64, 64), np.uint8)
    image[0, 0], image[0, 1], image[0, 2] = 200, 100, 50
    page = np.asarray(contact_sheet(data(image), columns=1, rows=1))
    assert page[TITLE + 30, GAP + 30].tolist() == [200, 100, 50]


@pytest.mark.parametrize(("side", "tile"), [(28, 84), (64, 64), (128, 128), (512, 160)])
def test_small_images_are_enlarged_and_large_ones_reduced(side: int, tile: int) -> None:
    page = contact_sheet(data(flat([0, 0], side=side)), columns=2, rows=1)
    assert page.width == 2 * (tile + GAP) + GAP


def test_a_stand_in_says_synthetic() -> None:
    images = flat([0])
    real, synthetic = (np.asarray(contact_sheet(data(images, kind), 12, 1)) for kind in ("real", "synthetic"))
    assert (real[:TITLE] < 128).sum() < (synthetic[:TITLE] < 128).sum()


@pytest.mark.parametrize(
    "images",
    [np.zeros((4, 10), np.float32), np.zeros((4, 2, 8, 8), np.uint8), np.zeros((0, 1, 8, 8), np.uint8)],
    ids=["features", "two channels", "empty"],
)
def test_what_is_no_set_of_images_is_refused(images: np.ndarray) -> None:
    with pytest.raises(DataError, match="tiny"):
        contact_sheet(data(images))


def test_file_is_whole_and_the_folder_clean(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sheet.png"
    save_contact_sheet(data(flat([1, 2])), path, 2, 1)
    with Image.open(path) as image:
        assert image.size == contact_sheet(data(flat([1, 2])), 2, 1).size
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="out=<folder>"):
        save_contact_sheet(data(flat([1])), tmp_path / "file" / "sheet.png")


def run(repository: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "scripts" / "contact_sheet.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def test_the_command_draws_a_stand_in(repository: Path, tmp_path: Path) -> None:
    """H14: from another folder too."""
    places = (f"dataset.root={tmp_path / 'raw'}", f"dataset.prepared_root={tmp_path / 'prepared'}")
    options = ("dataset=rsna_synthetic", *places, "dataset.num_images=20", "image_size=16")
    done = run(repository, *options, "columns=5", "rows=2", "out=sheet.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sheet.png"
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.width == 5 * (64 + GAP) + GAP


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["columns=0"], "columns=0: must be a whole number"),
        (["rows=many"], "rows=many"),
        (["out="], "write out=<value>"),
        (["dataset=rsna_synthetik"], "rsna_synthetic"),
        (["dataset=rsna", "dataset.root=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes_are_told_in_one_message(
    arguments: list[str], says: str, repository: Path, tmp_path: Path
) -> None:
    done = run(repository, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
