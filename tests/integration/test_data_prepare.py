"""Prepare: bad files, repetition, damage, full disks. Nothing half-done looks whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_cases import picture, snapshot, write_afad
from data_slow import SlowAFAD

from gramgn.data import AFAD, ImageDataset, Index, Item
from gramgn.errors import DataError
from gramgn.files import writing


def afad(root: Path, **options: Any) -> AFAD:
    """Return the data set with its prepared folder beside the root."""
    return AFAD(root, **{"prepared_root": root.parent / "prepared", "workers": 1, **options})


def content(folder: Path) -> dict[str, Any]:
    """Return every file of a prepared set, without the times of writing."""
    files: dict[str, Any] = snapshot(folder)
    del files["raw.json"]  # times of the raw files
    meta = json.loads(files["meta.json"])
    for facts in meta["files"].values():
        del facts["mtime_ns"]
    return {**files, "meta.json": meta}


def plant(root: Path) -> dict[str, Path]:
    """Add half a JPEG, an empty file and an HTML file, all named as photos."""
    folder = root / "25" / "111"
    folder.mkdir(parents=True, exist_ok=True)
    bad = {name: folder / f"{number}-0.jpg" for number, name in enumerate(("half", "empty", "html"), start=1)}
    picture(1, (60, 60)).save(bad["half"])
    bad["half"].write_bytes(bad["half"].read_bytes()[:900])
    bad["empty"].write_bytes(b"")
    bad["html"].write_text("<html>Not found</html>")
    return bad


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_images_are_all_named(tmp_path: Path, workers: int) -> None:
    """D02: every file is tried, all bad ones are named in one message, and there is no prepared set."""
    photos = write_afad(tmp_path / "raw", 12)
    bad = plant(tmp_path / "raw")
    dataset = afad(tmp_path / "raw", workers=workers)
    with pytest.raises(DataError) as error:
        dataset.load(16)
    message = str(error.value)
    assert f"3 of {len(photos) + 3} images" in message
    assert "on_bad_image=skip" in message
    for name, reason in (("half", "damaged or incomplete"), ("empty", "empty"), ("html", "not an image")):
        (line,) = [line for line in message.splitlines() if str(bad[name]) in line]
        assert reason in line
    assert not dataset.prepared_folder(16).exists()


def test_skipped_images_are_recorded(tmp_path: Path) -> None:
    """D02: skip leaves them out, with names and count in the summary that every run records."""
    photos = write_afad(tmp_path / "raw", 12)
    plant(tmp_path / "raw")
    with pytest.raises(DataError):
        afad(tmp_path / "raw").prepare(16)
    dataset = afad(tmp_path / "raw", on_bad_image="skip")
    data = dataset.load(16)
    assert list(data.keys) == sorted(photos)
    assert data.summary["skipped"] == 3
    meta = (dataset.prepared_folder(16) / "meta.json").read_text()
    assert [entry["path"] for entry in json.loads(meta)["skipped"]] == [
        f"25/111/{n}-0.jpg" for n in (1, 2, 3)
    ]
    assert str(tmp_path) not in meta
    with pytest.raises(DataError, match="prepared without 3 files"):
        afad(tmp_path / "raw").load(16)


def test_mended_images_are_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D02: after downloading the bad files again a set made with skip is rebuilt."""
    write_afad(tmp_path / "raw", 12)
    bad = plant(tmp_path / "raw")
    folder = afad(tmp_path / "raw", on_bad_image="skip").prepare(16)
    for number, path in enumerate(bad.values()):
        picture(number).save(path)
    assert afad(tmp_path / "raw").prepare(16) == folder
    assert "rebuilding it" in capsys.readouterr().err
    assert len(afad(tmp_path / "raw").load(16).keys) == 19


def test_only_bad_images_is_an_error_even_with_skip(tmp_path: Path) -> None:
    """D01: a set without samples is never made."""
    plant(tmp_path / "raw")
    with pytest.raises(DataError, match="3 of 3 images"):
        afad(tmp_path / "raw", on_bad_image="skip").load(16)


def test_preparing_again_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_afad(tmp_path / "raw", 6)
    folder = afad(tmp_path / "raw").prepare(16)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    assert afad(tmp_path / "raw").prepare(16) == folder
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before
    assert "already prepared" in capsys.readouterr().err
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_changed_raw_files_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = write_afad(tmp_path / "raw", 6)
    afad(tmp_path / "raw").prepare(16)
    (tmp_path / "raw" / photos[0]).unlink()
    afad(tmp_path / "raw").prepare(16)
    assert "raw files gone: 1" in capsys.readouterr().err
    assert len(afad(tmp_path / "raw").load(16).keys) == len(photos) - 1


def test_a_prepared_set_needs_no_raw_files(tmp_path: Path) -> None:
    write_afad(tmp_path / "raw", 6)
    first = afad(tmp_path / "raw").load(16)
    shutil.rmtree(tmp_path / "raw")
    dataset = afad(tmp_path / "raw")
    dataset.check(16)
    assert dataset.load(16).manifest_sha256 == first.manifest_sha256
    assert dataset.prepare(16) == dataset.prepared_folder(16)
    with pytest.raises(DataError, match="no usable raw data"):
        dataset.check(32)


def test_processes_make_the_same_set(tmp_path: Path) -> None:
    """D11: byte for byte, whatever the number of workers and the order in which files were created."""
    write_afad(tmp_path / "one" / "raw", 40)
    write_afad(tmp_path / "two" / "raw", 40, reverse=True)
    first = afad(tmp_path / "one" / "raw", workers=1).prepare(16)
    second = afad(tmp_path / "two" / "raw", workers=2).prepare(16)
    assert content(first) == content(second)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("images.npy", "gone"), ("images.npy", "cut"), ("manifest.csv", "changed"), ("meta.json", "cut")],
)
def test_a_damaged_set_is_rejected(
    tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """D01: with the command that rebuilds it; which then does."""
    write_afad(tmp_path / "raw", 6)
    dataset = afad(tmp_path / "raw")
    folder = dataset.prepare(16)
    whole, before = content(folder), (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    elif damage == "cut":
        (folder / name).write_bytes(before[: len(before) // 2])
    else:
        (folder / name).write_bytes(b"?" + before[1:])
    with pytest.raises(DataError, match=r"damaged .*python scripts/prepare_data\.py dataset=afad") as error:
        dataset.load(16)
    assert str(folder) in str(error.value)
    dataset.prepare(16)
    assert "rebuilding it" in capsys.readouterr().err
    assert content(folder) == whole


def test_verify_hashes_what_size_and_time_do_not_show(tmp_path: Path) -> None:
    """A start compares size and time; a copied folder is hashed; `verify` hashes every byte."""
    write_afad(tmp_path / "raw", 6)
    dataset = afad(tmp_path / "raw")
    with pytest.raises(DataError, match="Prepare it with: python"):
        dataset.verify(16)
    folder = dataset.prepare(16)
    assert dataset.verify(16) == folder
    images = folder / "images.npy"
    whole, time_ns = images.read_bytes(), images.stat().st_mtime_ns
    images.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(images, ns=(time_ns, time_ns))
    dataset.load(16)
    with pytest.raises(DataError, match=r"images\.npy differs"):
        dataset.verify(16)
    os.utime(images)
    with pytest.raises(DataError, match=r"images\.npy differs"):
        dataset.load(16)
    images.write_bytes(whole)
    dataset.load(16)


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two images: no set, no remains; the next start makes the same set."""
    write_afad(tmp_path / "raw", 9)
    expected = content(afad(tmp_path / "raw", prepared_root=tmp_path / "whole").prepare(16))
    dataset = afad(tmp_path / "raw")
    decode, decoded = dataset.decoder(16), iter(range(5))

    def interrupted(item: Item) -> Any:
        if next(decoded, None) is None:
            raise KeyboardInterrupt
        return decode(item)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "decoder", lambda size: interrupted)
        with pytest.raises(KeyboardInterrupt):
            dataset.prepare(16)
    assert not [path for path in dataset.prepared_root.iterdir() if path.is_dir()]
    assert content(dataset.prepare(16)) == expected


FULL_DISK = """
import resource, sys
from pathlib import Path
from gramgn.data import AFAD
from gramgn.errors import DataError
from gramgn.files import writing
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    AFAD(sys.argv[1], prepared_root=sys.argv[2], workers=1).prepare(16)
except DataError as error:
    sys.exit(f"DataError: {error}")
"""


@pytest.mark.parametrize("limit", [0, 3000, 12_300])
def test_a_full_disk_is_one_message(tmp_path: Path, limit: int) -> None:
    """A file that may not grow stands in for a full disk: one error, no set, and the next start finishes."""
    write_afad(tmp_path / "raw", 12)
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "raw"), str(tmp_path / "prepared"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("DataError: ")]
    for part in ("cannot write to", "File too large", "free", "needed", "dataset.prepared_root=<folder>"):
        assert part in message
    dataset = afad(tmp_path / "raw")
    assert not dataset.prepared_folder(16).exists()
    assert len(dataset.load(16).keys) == 16


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be; permissions do not stop a superuser."""
    write_afad(tmp_path / "raw", 3)
    (tmp_path / "prepared").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write to .*prepared.*dataset\.prepared_root=<folder>"):
        afad(tmp_path / "raw").load(16)


def test_disk_messages_name_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"file\.bin: No space left on device, .* free, about 1\.0 MiB needed"),
        writing(tmp_path, "dataset.prepared_root", 2**20),
    ):
        raise OSError(28, os.strerror(28), str(tmp_path / "file.bin"))


def test_a_worker_that_dies_is_one_message(tmp_path: Path) -> None:
    """Out of memory kills a worker: no endless wait, one message, finished work is kept."""
    photos = write_afad(tmp_path / "raw", 12)
    dataset = SlowAFAD(tmp_path / "raw", prepared_root=tmp_path / "prepared", workers=2)
    dataset.doomed = sorted(photos)[-1]
    with pytest.raises(DataError, match=r"worker process .* died.*dataset\.workers=1"):
        dataset.prepare(16)
    assert not dataset.prepared_folder(16).exists()


class Broken(ImageDataset):
    """A user's class with faults."""

    unit, layout, source = "years", "anything", "nowhere"
    items: tuple[Item, ...] = ()

    def has_raw(self) -> bool:
        """Pretend."""
        return True

    def index(self) -> Index:
        """Return what was planted."""
        return Index(list(self.items))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((), "no usable raw data"),
        ((Item("a", "1.png", 1.0), Item("a", "2.png", 1.0)), "share the key 'a'"),
        ((Item("a", "1.png", float("nan")),), "has the target nan; must be a finite number"),
        ((Item("a", "1.png", None),), "has the target None; must be a finite number"),  # type: ignore[arg-type]
        ((Item("a", "1.png", "7 years"),), "has the target '7 years'"),  # type: ignore[arg-type]
        ((Item("a", Path("1.png"), 1.0),), "both must be text"),  # type: ignore[arg-type]
        ((Item(3, "1.png", 1.0), Item("a", "2.png", 2.0)), "the key 3: both must be text"),  # type: ignore[arg-type]
        ((Item("a", "gone.png", 1.0),), r"gone\.png: cannot be read"),
    ],
)
def test_faulty_classes_are_told(tmp_path: Path, items: tuple[Item, ...], message: str) -> None:
    """D09: a data set of a user's own with duplicate keys, NaN targets or missing files."""
    dataset = Broken(tmp_path, name="own", prepared_root=tmp_path / "prepared")
    dataset.items = items
    with pytest.raises(DataError, match=message):
        dataset.load(16)
