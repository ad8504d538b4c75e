"""The contact sheet: evenly spread samples with their targets, and a command line that answers mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gramgn.data import RegressionData, contact_sheet, save_contact_sheet
from gramgn.errors import DataError, InputError


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


def tiles(page: Image.Image, levels: list[int]) -> list[int]:
    """Return the grey levels of the tiles along the middle of a page with one row."""
    row = np.asarray(page.convert("L"))[page.height // 2]
    found = [int(level) for level in row if level in levels]
    return [level for place, level in enumerate(found) if place == 0 or level != found[place - 1]]


@pytest.mark.parametrize(("num", "expected"), [(3, [250, 130, 10]), (1, [250]), (9, [250, 190, 130, 70, 10])])
def test_tiles_are_spread_by_rank_from_the_smallest_target_to_the_largest(
    num: int, expected: list[int]
) -> None:
    levels = [10, 70, 130, 190, 250]  # targets 5 to 1
    assert tiles(contact_sheet(data(flat(levels)), columns=num, rows=1), levels) == expected


def test_a_small_set_has_no_empty_rows() -> None:
    two_rows = contact_sheet(data(flat([0] * 5)), columns=4, rows=8)
    assert two_rows.size == contact_sheet(data(flat([0] * 8)), columns=4, rows=2).size


def test_colours_are_kept() -> None:
    image = np.zeros((1, 3, 64, 64), np.uint8)
    image[0, 0], image[0, 1], image[0, 2] = 200, 100, 50
    page = contact_sheet(data(image), columns=1, rows=1)
    assert page.getpixel((page.width // 2, page.height // 2)) == (200, 100, 50)


@pytest.mark.parametrize(("side", "tile"), [(28, 84), (64, 64), (128, 128), (512, 160)])
def test_small_images_are_enlarged_and_large_ones_reduced(side: int, tile: int) -> None:
    one, two = (contact_sheet(data(flat([0, 0], side=side)), columns=columns, rows=1) for columns in (1, 2))
    assert tile <= two.width - one.width <= tile + 6


def test_a_synthetic_set_says_so() -> None:
    real, synthetic = (
        np.asarray(contact_sheet(data(flat([255]), kind), 12, 1)) for kind in ("real", "synthetic")
    )
    assert (real < 128).sum() < (synthetic < 128).sum()


@pytest.mark.parametrize(
    "images",
    [np.zeros((4, 10), np.float32), np.zeros((4, 2, 8, 8), np.uint8), np.zeros((0, 1, 8, 8), np.uint8)],
    ids=["features", "two channels", "empty"],
)
def test_what_is_no_set_of_images_is_rejected(images: np.ndarray) -> None:
    with pytest.raises(DataError, match="tiny"):
        contact_sheet(data(images))


def test_file_is_whole_and_the_folder_clean(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sheet.png"
    save_contact_sheet(data(flat([1, 2])), path, 2, 1)
    with Image.open(path) as image:
        assert image.size == contact_sheet(data(flat([1, 2])), 2, 1).size
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out=<folder>"):
        save_contact_sheet(data(flat([1])), tmp_path / "file" / "sheet.png")


def run(repository: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "scripts" / "contact_sheet.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def test_the_command_draws_a_synthetic_set(repository: Path, tmp_path: Path) -> None:
    """H14: from another folder too."""
    places = (f"dataset.root={tmp_path / 'raw'}", f"dataset.prepared_root={tmp_path / 'prepared'}")
    options = ("dataset=rsna_synthetic", *places, "dataset.num_images=20", "image_size=16")
    done = run(repository, *options, "columns=5", "rows=2", "out=sheet.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sheet.png"
    with Image.open(tmp_path / "sheet.png") as image:
        assert 5 * 64 < image.width < 5 * 70


def test_mistakes_are_one_message(repository: Path, tmp_path: Path) -> None:
    for argument, says in (
        ("columns=0", "columns=0: must be an integer"),
        ("out=", "write out=<value>"),
    ):
        done = run(repository, argument, cwd=tmp_path)
        assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False), (
            done.stderr
        )
    assert not list(tmp_path.iterdir())
