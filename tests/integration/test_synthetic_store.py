"""Synthetic sets on disk: real names, same bytes, whole or not there, whatever happens while they are drawn."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gramgn.data import ImageDataset
from gramgn.errors import DataError
from gramgn.synthetic import AFADSynthetic, RSNASynthetic

CLASSES = {"hands": RSNASynthetic, "faces": AFADSynthetic}

DRAW = """
import sys
from gramgn.synthetic import RSNASynthetic

{guard}RSNASynthetic(sys.argv[1], num_images=int(sys.argv[2]), workers=int(sys.argv[3])).ensure_raw()
"""
GUARD = "if __name__ == '__main__': "


def drawn(kind: str, base: Path, num_images: int = 12, **options: Any) -> ImageDataset:
    """Return a set below `base`, not drawn yet."""
    return CLASSES[kind](base, num_images=num_images, workers=options.pop("workers", 1), **options)


def start(base: Path, num_images: int, workers: int, guard: str = GUARD) -> subprocess.Popen[str]:
    """Draw hands in a process of its own."""
    script = base.parent / "draw.py"
    script.write_text(DRAW.format(guard=guard))
    return subprocess.Popen(
        [sys.executable, str(script), str(base), str(num_images), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageDataset]:
    """Return one drawn set of each kind, large enough for two processes; do not change them."""
    base = tmp_path_factory.mktemp("sets")
    found = {kind: drawn(kind, base / kind, 100, workers=2) for kind in CLASSES}
    for dataset in found.values():
        dataset.ensure_raw()
    return found


def test_hands_lie_in_the_layout_of_kaggle(sets: dict[str, ImageDataset]) -> None:
    folder = sets["hands"].root
    inner = folder / "boneage-training-dataset" / "boneage-training-dataset"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".DS_Store",
        "boneage-training-dataset",
        "boneage-training-dataset.csv",
        "synthetic.json",
    ]
    assert (inner / "Thumbs.db").is_file()
    assert {path.stem for path in inner.glob("*.png")} == {str(number) for number in range(1377, 1477)}
    head, *rows = (folder / "boneage-training-dataset.csv").read_text().splitlines()
    assert head == "id,boneage,male"
    ids = [int(row.split(",")[0]) for row in rows]
    assert sorted(ids) == list(range(1377, 1477))
    assert ids != sorted(ids)
    assert {row.split(",")[2] for row in rows} == {"True", "False"}


def test_faces_lie_in_the_layout_of_afad_lite(sets: dict[str, ImageDataset]) -> None:
    folder = sets["faces"].root
    photos = {path.relative_to(folder / "AFAD-Lite").as_posix() for path in folder.rglob("*.jpg")}
    assert len(photos) == 100
    listed = (folder / "AFAD-Lite" / "AFAD-Lite.txt").read_text().split()
    assert {line.removeprefix("./") for line in listed} == photos
    assert list(folder.rglob("Thumbs.db"))


@pytest.mark.parametrize("kind", CLASSES)
def test_same_seed_same_bytes_with_any_number_of_processes(
    kind: str, tmp_path: Path, sets: dict[str, ImageDataset]
) -> None:
    """T10: the result does not depend on the number of workers."""
    alone, other = drawn(kind, tmp_path, 100), drawn(kind, tmp_path, 12, seed=1)
    alone.ensure_raw()
    other.ensure_raw()
    assert digests(alone.root) == digests(sets[kind].root)
    pictures = {digest for name, digest in digests(alone.root).items() if name.endswith(("png", "jpg"))}
    assert not pictures & set(digests(other.root).values())


def test_a_killed_drawing_leaves_no_set_and_no_process(tmp_path: Path, sets: dict[str, ImageDataset]) -> None:
    """Kill -9: nothing can be taken for whole, no worker outlives its parent, the next start draws the same set."""
    base = tmp_path / "raw"
    process = start(base, 2000, 2)
    partial = base / ".n2000-seed0.partial"
    deadline = time.monotonic() + 60
    while not list(partial.rglob("*.png")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    assert partial.is_dir()
    assert not (base / "n2000-seed0").exists()
    time.sleep(0.5)
    before = len(digests(partial))
    time.sleep(0.3)
    assert len(digests(partial)) == before, "a worker outlived its parent"
    partial.rename(base / ".n100-seed0.partial")
    dataset = drawn("hands", base, 100)
    dataset.ensure_raw()
    assert digests(dataset.root) == digests(sets["hands"].root)
    assert not list(base.glob("*.partial"))


def test_two_processes_draw_one_set(tmp_path: Path) -> None:
    base = tmp_path / "raw"
    both = [start(base, 150, 1) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum("drawing 150 synthetic pictures" in text for text in errors) == 1
    assert len(list((base / "n150-seed0").rglob("*.png"))) == 150
    assert not list(base.glob("*.partial"))


def test_a_script_without_a_main_guard_draws_without_workers(tmp_path: Path) -> None:
    """Worker processes would run the script again."""
    process = start(tmp_path / "raw", 130, 2, guard="")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"{tmp_path / 'draw.py'} has no if __name__ == '__main__'" in errors
    assert len(list((tmp_path / "raw" / "n130-seed0").rglob("*.png"))) == 130


def test_code_next_to_a_main_guard_ends_with_an_error(tmp_path: Path) -> None:
    """The workers run it again; they must not wait for the lock that their parent holds."""
    process = start(tmp_path / "raw", 200, 2, guard="print(__name__)\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "if __name__ == '__main__'" in errors.splitlines()[-1]
    assert not (tmp_path / "raw" / "n200-seed0").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_failed_write_is_one_message_and_leaves_no_set(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = drawn("hands", tmp_path / "raw")
    written = iter(range(6))
    original = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if next(written, None) is None:
            raise OSError(number, os.strerror(number), str(path))
        return original(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        with pytest.raises(DataError, match=os.strerror(number)) as raised:
            dataset.ensure_raw()
    assert "dataset.root" in str(raised.value)
    assert not [path for path in (tmp_path / "raw").iterdir() if path.is_dir()]
    dataset.ensure_raw()
    assert len(list(dataset.root.rglob("*.png"))) == 12


def test_too_little_space_is_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2000, 1000, 1000))
    with pytest.raises(DataError, match="needed"):
        drawn("hands", tmp_path / "raw").ensure_raw()
    assert not list(tmp_path.rglob("*.png"))


def test_a_file_in_the_way_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("not a folder")
    with pytest.raises(DataError, match=r"dataset\.root"):
        drawn("hands", tmp_path / "raw").ensure_raw()


def test_a_whole_set_is_left_alone(sets: dict[str, ImageDataset]) -> None:
    before = {path: path.stat().st_mtime_ns for path in sets["faces"].root.rglob("*")}
    sets["faces"].ensure_raw()
    assert {path: path.stat().st_mtime_ns for path in sets["faces"].root.rglob("*")} == before


def test_another_set_in_the_folder_is_rejected_and_not_touched(tmp_path: Path) -> None:
    dataset = drawn("faces", tmp_path)
    dataset.ensure_raw()
    marker = dataset.root / "synthetic.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": 0}))
    before = digests(dataset.root)
    for attempt in (dataset.ensure_raw, dataset.check_raw):
        with pytest.raises(DataError, match="Remove or rename") as raised:
            attempt()
        assert str(dataset.root) in str(raised.value)
    assert digests(dataset.root) == before
    marker.write_text("{")
    with pytest.raises(DataError, match=r"no readable synthetic\.json"):
        dataset.check_raw()
