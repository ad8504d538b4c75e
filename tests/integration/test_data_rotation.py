"""Rotation of any images, and RetinaMNIST: arrays in npz files and mixed folders."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import picture
from PIL import Image

from gramgn.data import RetinaMNIST, Rotation
from gramgn.errors import DataError


def rotation(root: Path, **options: Any) -> Rotation:
    """Return the data set with its prepared folder beside the root."""
    return Rotation(root, **{"prepared_root": root.parent / "prepared", "workers": 1, **options})


def write_mixed(root: Path) -> None:
    """Write images of every pixel format at two depths."""
    (root / "inner" / "deep").mkdir(parents=True)
    for number, mode in enumerate(("L", "RGB", "LA", "RGBA", "P", "1")):
        picture(number, (30, 40)).convert(mode).save(root / "inner" / f"{mode}.png")
    picture(7, (30, 40)).convert("CMYK").save(root / "inner" / "deep" / "cmyk.jpg")
    Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50).save(root / "deep16.png")


@pytest.mark.parametrize("channels", [1, 3])
def test_mixed_folder_gives_one_shape(tmp_path: Path, channels: int) -> None:
    """D07: a folder mixing L, RGB, LA, RGBA, P, CMYK and 16-bit images."""
    write_mixed(tmp_path / "raw")
    data = rotation(tmp_path / "raw", channels=channels).load(16)
    assert (data.unit, data.images.shape) == ("degrees", (8, channels, 16, 16))
    assert "inner/deep/cmyk.jpg" in data.keys
    assert np.abs(data.targets).max() <= 45


def test_the_angle_is_the_target(tmp_path: Path) -> None:
    """Turned by the target, counter-clockwise positive: turning back gives the original."""
    (tmp_path / "raw").mkdir()
    bar = Image.new("L", (64, 64))
    bar.paste(255, (32, 28, 64, 36))  # points to the right: its angle is 0
    for number in range(12):
        bar.save(tmp_path / "raw" / f"{number}.png")
    data = rotation(tmp_path / "raw", max_angle=80, channels=1).load(32)
    assert np.ptp(data.targets) > 60
    for image, angle in zip(data.images[:, 0].astype(float), data.targets, strict=True):
        row, column = np.indices(image.shape) - 15.5
        found = np.degrees(np.arctan2(-(image * row).sum(), (image * column).sum()))
        assert found == pytest.approx(angle, abs=2)


def test_corners_do_not_give_the_angle_away(tmp_path: Path) -> None:
    """A white square turned by any angle is the same white disk."""
    (tmp_path / "raw").mkdir()
    for number in range(10):
        Image.new("L", (50 + 20 * number, 70), 255).save(tmp_path / "raw" / f"{number}.png")
    images = rotation(tmp_path / "raw", channels=1).load(24).images
    assert (images == images[0]).all()
    assert set(np.unique(images)) == {0, 255}
    assert images[0, 0, 0].max() == images[0, 0, :, 0].max() == 0
    assert images[0].mean() > 0.55 * 255


def test_angles_depend_on_key_and_seed_only(tmp_path: Path) -> None:
    """D11: the same angles after moving; other ones with another seed."""
    write_mixed(tmp_path / "one" / "raw")
    shutil.copytree(tmp_path / "one" / "raw", tmp_path / "two" / "raw")
    first, second = (rotation(tmp_path / name / "raw").load(16) for name in ("one", "two"))
    assert first.manifest_sha256 == second.manifest_sha256
    assert list(first.targets) != list(rotation(tmp_path / "one" / "raw", angle_seed=1).load(16).targets)


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize(
    ("shape", "dtype", "stored"),
    [
        ((6, 20, 24), np.uint8, 1),
        ((6, 20, 24, 3), np.uint8, 3),
        ((6, 20, 24, 1), np.uint8, 1),
        ((6, 9, 9), np.uint16, 1),
    ],
)
def test_npz_of_images(tmp_path: Path, form: str, shape: tuple[int, ...], dtype: Any, stored: int) -> None:
    """D07: grey arrays are stored once, coloured ones with three channels."""
    (tmp_path / "raw").mkdir()
    values = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape).astype(dtype)
    np.savez(tmp_path / "raw" / "hands.npz", images=values)
    dataset = rotation(tmp_path / "raw" / "hands.npz" if form == "file" else tmp_path / "raw", workers=None)
    dataset.check(12)
    data = dataset.load(12)
    assert (data.images.shape, data.channels) == ((6, stored, 12, 12), 3)
    assert data.keys[5] == "images-000005"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 4, 4)), "y": np.zeros(3)}, "no array whose name ends in 'images'"),
        ({"images": np.zeros((3, 4, 4))}, "float64"),
        ({"images": np.zeros((3, 4, 4, 2), np.uint8)}, "must be uint8"),
        ({"images": np.zeros((0, 4, 4), np.uint8)}, "must be uint8"),
        ({"images": np.array([{}, {}], dtype=object)}, "plain arrays"),
    ],
)
def test_unusable_npz_files_are_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    """D01: what the file holds and what it should hold."""
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        rotation(tmp_path / "a.npz").load(8)
    assert str(tmp_path / "a.npz") in str(error.value)


def test_a_damaged_npz_is_named(tmp_path: Path) -> None:
    """D02: half a download."""
    np.savez(tmp_path / "whole.npz", images=np.zeros((9, 8, 8), np.uint8))
    whole = (tmp_path / "whole.npz").read_bytes()
    for name, content in (("half.npz", whole[:200]), ("empty.npz", b""), ("html.npz", b"<html></html>")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            rotation(tmp_path / name).load(8)


def test_missing_file_folder_and_two_files(tmp_path: Path) -> None:
    """D01: nothing there, and too much there."""
    for root in (tmp_path / "no.npz", tmp_path / "none"):
        with pytest.raises(DataError, match="no usable raw data"):
            rotation(root).check(8)
    (tmp_path / "raw").mkdir()
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / "raw" / name, images=np.zeros((3, 8, 8), np.uint8))
    with pytest.raises(DataError, match=r"set dataset\.root to one of a\.npz, b\.npz"):
        rotation(tmp_path / "raw").check(8)


def test_strays_in_a_folder_of_images(tmp_path: Path) -> None:
    """D04: hidden files and other files are not images, and are reported."""
    write_mixed(tmp_path / "raw")
    for name in ("._L.png", "Thumbs.db", "readme.txt"):
        (tmp_path / "raw" / "inner" / name).write_bytes(b"x")
    data = rotation(tmp_path / "raw").load(8)
    assert len(data.keys) == 8
    assert data.summary["unused"] == {"system or hidden file": 2, "not an image by its name": 1}


def write_retina(path: Path, **replaced: Any) -> None:
    """Write a file like RetinaMNIST's, with few images."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, num in (("train", 20), ("val", 5), ("test", 8)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (num, 28, 28, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = rng.integers(0, 5, (num, 1)).astype(np.uint8)
    arrays.update(replaced)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def test_retinamnist_is_prepared_at_its_own_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published splits, native 28 x 28 pixel by pixel, and a word where the file is not the published one."""
    write_retina(tmp_path / "retinamnist.npz")
    dataset = RetinaMNIST(tmp_path, prepared_root=tmp_path / "p")
    data = dataset.load(64)
    assert (data.images.shape, data.unit) == ((33, 3, 28, 28), "grade")
    assert [list(data.split).count(split) for split in ("train", "val", "test")] == [20, 5, 8]
    with np.load(tmp_path / "retinamnist.npz") as raw:
        assert (data.images[data.split == "val"] == raw["val_images"].transpose(0, 3, 1, 2)).all()
        assert (data.targets[data.split == "test"] == raw["test_labels"][:, 0]).all()
    assert dataset.prepared_folder(28) == dataset.prepared_folder(64)
    assert "not the published file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "replaced",
    [
        {"val_labels": None},
        {"val_images": None},
        {"test_labels": np.zeros(3)},
        {"train_labels": np.full(20, np.nan)},
        {"train_labels": np.array(["a"] * 20)},
    ],
)
def test_incomplete_retinamnist_is_rejected(tmp_path: Path, replaced: dict[str, Any]) -> None:
    """D09: images and labels that do not match, labels that are no numbers."""
    write_retina(tmp_path / "retinamnist.npz", **replaced)
    with pytest.raises(DataError, match=next(iter(replaced)).split("_")[0]):
        RetinaMNIST(tmp_path, prepared_root=tmp_path / "p").load(28)


def test_a_name_that_is_no_text_is_one_error(tmp_path: Path) -> None:
    """D04: on Linux a file's name may be any bytes, which no manifest can hold."""
    picture(0).save(tmp_path / "0.png")
    try:
        (tmp_path / os.fsdecode(b"bad\xff.png")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes text only")
    with pytest.raises(DataError, match=r"bad\\udcff\.png' is not valid Unicode; rename"):
        Rotation(tmp_path, name="rotation", prepared_root=tmp_path / "prepared").index()


def test_a_link_to_nowhere_is_a_bad_image(tmp_path: Path) -> None:
    """D02: named, or skipped and recorded."""
    for number in range(12):
        picture(number).save(tmp_path / f"{number}.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    options = {"name": "rotation", "prepared_root": tmp_path / ".prepared"}
    with pytest.raises(DataError, match=r"gone\.png"):
        Rotation(tmp_path, **options).prepare(16)
    prepared = Rotation(tmp_path, on_bad_image="skip", **options).prepare(16)
    assert "gone.png" in (prepared / "unused.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(("largest", "levels"), [(4095, 17), (32767, 128), (65535, 256)])
def test_16_bit_images_that_use_little_of_their_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], largest: int, levels: int
) -> None:
    """D03: reported, with the option that uses all of it; the set that it makes is another one."""
    (tmp_path / "raw").mkdir()
    for number in range(4):
        ramp = np.linspace(0, largest, 24 * 24).astype(np.uint16).reshape(24, 24)
        Image.fromarray(ramp).save(tmp_path / "raw" / f"{number}.png")
    dataset = rotation(tmp_path / "raw", channels=1)
    dataset.load(24)
    assert (
        f"4 16-bit images with no value above 4,095 of 65,535: they come out with {levels} grey levels"
        in capsys.readouterr().err
    ) == (levels < 128)
    wide = rotation(tmp_path / "raw", channels=1, grey_range=[0, largest])
    assert wide.load(24).images.max() > 230
    assert "16-bit" not in capsys.readouterr().err
    assert (wide.prepared_folder(24) == dataset.prepared_folder(24)) is False


@pytest.mark.parametrize("kind", [2, 4, 6])
def test_16_bit_colour_that_uses_little_of_its_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: int
) -> None:
    """D03: Pillow keeps the upper 8 bits of RGB, grey with alpha, and RGBA."""
    (tmp_path / "raw").mkdir()
    ramp = np.linspace(0, 4095, 24 * 24).astype(np.uint16).reshape(24, 24)
    values = [ramp] * {2: 3, 4: 1, 6: 3}[kind] + [np.full_like(ramp, 65535)] * (kind != 2)
    lines = b"".join(b"\0" + line.tobytes() for line in np.stack(values, -1).astype(">u2"))
    header = struct.pack(">IIBBBBB", 24, 24, 16, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    (tmp_path / "raw" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    rotation(tmp_path / "raw", grey_range=[0, 4095]).load(24)
    said = capsys.readouterr().err
    assert "1 16-bit colour image with no value above 3,855 of 65,535" in said
    assert "convert them to 8 bits" in said


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_of_several_frames_the_first_is_used_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    (tmp_path / "raw").mkdir()
    first, *others = (picture(number).convert("P") for number in range(3))
    first.save(tmp_path / "raw" / f"a.{suffix}", save_all=True, append_images=others, lossless=True)
    first.save(tmp_path / "raw" / "b.png")
    data = rotation(tmp_path / "raw", max_angle=0.1).load(8)
    assert "1 image with several frames: the first frame is used" in capsys.readouterr().err
    a, b = data.images.astype(int)
    assert np.abs(a - b).max() <= 4  # another angle


def test_a_grade_that_does_not_exist_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.stack([np.asarray(picture(i, (28, 28))) for i in range(4)])
    labels = np.array([[0], [4], [5], [255]], np.uint8)
    arrays = {f"{split}_{what}": array for split in ("train", "val", "test") for what, array in
              (("images", images), ("labels", labels))}  # fmt: skip
    np.savez(tmp_path / "retinamnist.npz", **arrays)
    data = RetinaMNIST(tmp_path, prepared_root=tmp_path / "prepared").load(28)
    assert set(data.targets) == {0.0, 4.0}
    assert "6 x target outside 0 to 4 grade" in capsys.readouterr().err


def test_a_named_pipe_is_a_bad_image(tmp_path: Path) -> None:
    """D02: opening it would wait forever."""
    for number in range(3):
        (tmp_path / "raw").mkdir(exist_ok=True)
        picture(number).save(tmp_path / "raw" / f"{number}.png")
    os.mkfifo(tmp_path / "raw" / "pipe.png")
    with pytest.raises(DataError, match=r"1 of 4 images cannot be used:\n.*pipe\.png: not a regular file"):
        rotation(tmp_path / "raw").load(16)
    assert len(rotation(tmp_path / "raw", on_bad_image="skip").load(16).keys) == 3
