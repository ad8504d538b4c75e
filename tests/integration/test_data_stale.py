"""Prepared data that is older than what it was prepared from: noticed by every start, whatever has changed."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import picture, train_rows, write_afad, write_csv, write_kaggle, write_png
from house import SMALL, Call, House, read_run

from gramgn.data import AFAD, RSNA, ImageDataset, Rotation
from gramgn.errors import DataError
from gramgn.synthetic import RSNASynthetic

PAGES = """
from gramgn.data import Decoder, ImageDataset, Index, Item


class Inverted(Decoder):
    def square(self, image, item):
        pixels, note = super().square(image, item)
        return pixels {invert}, note


class Pages(ImageDataset):
    unit, layout, source = "lines", "<page>.png and lines.txt", "here"

    def __init__(self, root, *, name="pages", factor=1, **options):
        super().__init__(root, name=name, **options)
        self.factor = factor

    def has_raw(self):
        return self.root.is_dir()

    def decoder(self, size):
        return Inverted(self.root, size, self.stored_channels, self.resize)

    def index(self):
        lines = (self.root / "lines.txt").read_text().split()
        paths = sorted(path.name for path in self.root.glob("*.png"))
        return Index([Item(p, p, {target}) for p, n in zip(paths, lines)])
"""


def rsna(root: Path, **options: Any) -> RSNA:
    return RSNA(root / "raw", prepared_root=root / "prepared", workers=1, **options)


def pages(
    folder: Path, target: str = "float(n) * self.factor", invert: str = ""
) -> Callable[..., ImageDataset]:
    """Return a user's class from a module that may have been edited; its images lie in `raw`."""
    (folder / "pages.py").write_text(PAGES.replace("{target}", target).replace("{invert}", invert))
    sys.modules.pop("pages", None)
    importlib.invalidate_caches()
    module = importlib.import_module("pages")

    def build(**options: Any) -> ImageDataset:
        result: ImageDataset = module.Pages(
            folder / "raw", prepared_root=folder / "prepared", workers=1, **options
        )
        return result

    return build


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write twelve pages and their numbers of lines."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "pages", raising=False)
    write_png(tmp_path / "raw", range(10, 22))
    (tmp_path / "raw" / "lines.txt").write_text(" ".join(map(str, range(12))))
    return tmp_path


def test_replaced_images_are_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same size and name, so that only the time differs."""
    write_kaggle(tmp_path / "raw", num_test=0)
    before = rsna(tmp_path).load(8)
    folder = tmp_path / "raw" / "boneage-training-dataset" / "boneage-training-dataset"
    content, status = (folder / "1378.png").read_bytes(), (folder / "1377.png").stat()
    (folder / "1377.png").write_bytes(content)
    os.utime(folder / "1377.png", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = rsna(tmp_path).load(8)
    assert (
        "raw files changed: 1 (boneage-training-dataset/boneage-training-dataset/1377.png)"
        in capsys.readouterr().err
    )
    assert after.manifest_sha256 != before.manifest_sha256
    assert (after.images[0] == after.images[1]).all()


def test_images_replaced_by_what_cannot_be_used(tmp_path: Path) -> None:
    """Files of another kind are not "gone": neither the old images nor nothing is trained on."""
    write_kaggle(tmp_path / "raw", num_test=0)
    folder = rsna(tmp_path).prepare(8)
    for path in (tmp_path / "raw").rglob("*.png"):
        path.rename(path.with_suffix(".dcm"))
    for attempt in (rsna(tmp_path).load, rsna(tmp_path).prepare):
        with pytest.raises(DataError, match=r"no usable raw data") as error:
            attempt(8)
        for part in (str(folder), "raw files new: 40", "raw files gone: 40", "leave its folder empty"):
            assert part in str(error.value)


def test_changed_labels_are_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_kaggle(tmp_path / "raw", num_test=0)
    rsna(tmp_path).prepare(8)
    rows = [(number, age + 1, male) for number, age, male in train_rows(range(1377, 1417))]
    write_csv(tmp_path / "raw" / "boneage-training-dataset.csv", ("id", "boneage", "male"), rows)
    assert rsna(tmp_path).load(8).targets[0] == rows[0][1]
    assert "boneage-training-dataset.csv" in capsys.readouterr().err


def test_an_edited_class_and_its_options_are_followed(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Targets, annotations, an option that its `settings` lack, and the user's own decoder."""
    first = pages(written)().load(8)
    assert pages(written)().load(8).manifest_sha256 == first.manifest_sha256
    assert "changed" not in capsys.readouterr().err
    assert (pages(written)(factor=3).load(8).targets == 3 * first.targets).all()
    assert "options changed: 1 (factor)" in capsys.readouterr().err
    edited = pages(written, "len(p) + 100.0")().load(8)
    assert "modules edited: 1 (pages)" in capsys.readouterr().err
    assert set(edited.targets) == {106.0}
    (written / "raw" / "lines.txt").write_text(" ".join(["7"] * 12))
    assert set(pages(written)().load(8).targets) == {7.0}
    images = np.array(pages(written)().load(8).images)
    assert (pages(written, invert="^ 255")().load(8).images == 255 - images).all()


def test_what_changes_nothing_is_not_decoded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A further stray file: the index is compared, the images stay as they are."""
    write_afad(tmp_path / "raw", 6)
    options: dict[str, Any] = {"prepared_root": tmp_path / "prepared", "workers": 1}
    folder = AFAD(tmp_path / "raw", **options).prepare(16)
    before = (folder / "images.npy").stat()
    (tmp_path / "raw" / "notes.txt").write_text("mine")
    capsys.readouterr()
    AFAD(tmp_path / "raw", **options).load(16)
    assert "raw files new: 1 (notes.txt)\nsamples and targets are the same" in capsys.readouterr().err
    assert (folder / "images.npy").stat() == before
    AFAD(tmp_path / "raw", **options).load(16)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", ["all", "all but the tables", "the folder"])
def test_raw_files_that_are_gone_leave_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    write_kaggle(tmp_path / "raw", num_test=0)
    before = rsna(tmp_path).load(8)
    if what == "the folder":
        shutil.rmtree(tmp_path / "raw")
    else:
        shutil.rmtree(tmp_path / "raw" / "boneage-training-dataset")
        if what == "all":
            (tmp_path / "raw" / "boneage-training-dataset.csv").unlink()
    capsys.readouterr()
    assert rsna(tmp_path).load(8).manifest_sha256 == before.manifest_sha256
    assert f"note: the raw files in {tmp_path / 'raw'} are gone" in capsys.readouterr().err
    assert rsna(tmp_path).prepare(8) == rsna(tmp_path).prepared_folder(8)


def test_only_the_npz_file_itself_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may lie among downloads."""
    (tmp_path / "raw").mkdir()

    def load(seed: int | None) -> np.ndarray:
        if seed is not None:
            images = np.stack([np.asarray(picture(seed + i, (12, 12), "L")) for i in range(10)])
            np.savez(tmp_path / "raw" / "hands.npz", images=images)
        return Rotation(tmp_path / "raw" / "hands.npz", prepared_root=tmp_path / "prepared").load(8).images

    first = np.array(load(0))
    (tmp_path / "raw" / "other.zip").write_text("a download")
    capsys.readouterr()
    assert (load(None) == first).all()
    assert capsys.readouterr().err == ""
    assert not (load(100) == first).all()


def test_a_run_keeps_its_data(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """The identity that a resume compares is that of the content: touched files do not matter, other ones do."""
    raw = house.root / "data" / "raw" / "mine"
    for seed in range(20):
        (raw / "images").mkdir(parents=True, exist_ok=True)
        picture(seed).save(raw / "images" / f"{seed}.png")
    options = [entry for entry in SMALL if not entry.startswith("dataset")]
    options += ["dataset=rotation", f"dataset.root={raw}", "model.channels=3"]
    assert call(*options) == 0
    (folder,) = house.runs()
    os.utime(raw / "images" / "3.png")
    assert call(f"resume={folder}", "trainer.epochs=3") == 0
    assert "raw files changed: 1 (images/3.png)" in capsys.readouterr().err
    picture(77).save(raw / "images" / "3.png")
    before = read_run(folder)
    assert call(f"resume={folder}", "trainer.epochs=4") == 2
    assert "not the one this run began with" in capsys.readouterr().err
    assert read_run(folder) == before


def test_the_recommended_command_exists(written: Path, house: House) -> None:
    """`--config-dir` is taken by both scripts; the command names every option that decides the folder."""
    (written / "conf" / "dataset").mkdir(parents=True)
    pages(written)
    keys = {"_target_": "pages.Pages", "name": "pages", "root": "???", "resize": "stretch"}
    (written / "conf" / "dataset" / "pages.yaml").write_text(
        "".join(f"{k}: '{v}'\n" for k, v in keys.items())
    )
    words = [
        "--config-dir",
        str(written / "conf"),
        "dataset=pages",
        f"dataset.root={written / 'raw'}",
        "image_size=8",
    ]
    house.environment = lambda **extra: {**os.environ, "PYTHONPATH": str(written), **extra}  # type: ignore[method-assign]
    done = house.script("scripts/prepare_data.py", *words, "dataset.resize=pad")
    assert done.returncode == 0, done.stderr
    (Path(done.stdout.strip()) / "images.npy").write_bytes(b"")
    done = house.script("scripts/prepare_data.py", *words, "dataset.resize=pad", "--check")
    assert "prepare_data.py --config-dir <your conf folder> dataset=pages" in done.stderr
    assert "dataset.resize=pad" in done.stderr
    assert house.script("scripts/contact_sheet.py", *words, "out=sheet.png").returncode == 0
    words[1] = "nowhere"
    assert "there is no such folder" in house.script("scripts/prepare_data.py", *words).stderr


def test_a_damaged_set_without_its_raw_files(tmp_path: Path) -> None:
    """What was drawn is drawn again by the recommended command; anything else names what is missing."""
    places: dict[str, Any] = {"prepared_root": tmp_path / "prepared", "workers": 1}
    drawn = RSNASynthetic(tmp_path / "drawn", num_images=12, **places)
    whole = drawn.load(8)
    write_kaggle(tmp_path / "raw", num_test=0)
    for dataset in (drawn, rsna(tmp_path)):
        (dataset.prepare(8) / "images.npy").write_bytes(b"")
        shutil.rmtree(dataset.root)
        with pytest.raises(DataError, match="is damaged"):
            dataset.load(8)
    drawn.prepare(8)
    assert drawn.load(8).manifest_sha256 == whole.manifest_sha256
    with pytest.raises(DataError, match="no usable raw data"):
        rsna(tmp_path).prepare(8)


def test_a_prepared_set_below_its_raw_files_is_no_raw_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        picture(number).save(tmp_path / f"{number}.png")
    for _ in range(2):
        capsys.readouterr()
        Rotation(tmp_path, prepared_root=tmp_path / "prepared", workers=1).load(16)
    assert capsys.readouterr().err == ""
