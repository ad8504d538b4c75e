"""Stand-ins on disk: real names, same bytes, whole or not there, whatever happens while they are drawn."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from gramgn.errors import DataError
from gramgn.synthetic import _store
from gramgn.synthetic.recipes import face_recipe, hand_recipe
from gramgn.synthetic.store import ALONE_BELOW, Recipe, draw_chunk, generate, matches

MARKER = {"kind": "synthetic", "generator": "test", "version": 1}
RECIPES = {
    "hands": partial(hand_recipe, reader_sd=0.0, marker=MARKER),
    "faces": partial(face_recipe, apparent_age_sd=5.0, marker=MARKER),
}

DRAW = """
import sys
from pathlib import Path
from gramgn.synthetic.recipes import hand_recipe
from gramgn.synthetic.store import generate

if __name__ == "__main__":
    marker = {"kind": "synthetic", "generator": "test", "version": 1}
    generate("hands", Path(sys.argv[1]), hand_recipe(int(sys.argv[2]), 0, 0.0, marker), int(sys.argv[3]))
"""


def start(folder: Path, num_images: int, workers: int) -> subprocess.Popen[str]:
    """Draw hands in a process of their own."""
    script = folder.parent.parent / "draw.py"
    script.write_text(DRAW)
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(num_images), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def num_drawn(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.png")) if folder.exists() else 0


def small(kind: str, num_images: int = 12, seed: int = 0) -> Recipe:
    return RECIPES[kind](num_images, seed)


def test_hands_lie_in_the_layout_of_kaggle(tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "set"
    generate("hands", folder, small("hands", 40))
    inner = folder / "boneage-training-dataset" / "boneage-training-dataset"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".DS_Store",
        "boneage-training-dataset",
        "boneage-training-dataset.csv",
        "synthetic.json",
    ]
    assert (inner / "Thumbs.db").is_file()
    assert {path.stem for path in inner.glob("*.png")} == {str(number) for number in range(1377, 1417)}
    head, *rows = (folder / "boneage-training-dataset.csv").read_text().splitlines()
    assert head == "id,boneage,male"
    ids = [int(row.split(",")[0]) for row in rows]
    assert sorted(ids) == list(range(1377, 1417))
    assert ids != sorted(ids)
    assert {row.split(",")[2] for row in rows} == {"True", "False"}
    assert json.loads((folder / "synthetic.json").read_text()) == MARKER


def test_faces_lie_in_the_layout_of_afad_lite(tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "set"
    generate("faces", folder, small("faces", 40))
    photos = {path.relative_to(folder / "AFAD-Lite").as_posix() for path in folder.rglob("*.jpg")}
    assert len(photos) == 40
    listed = (folder / "AFAD-Lite" / "AFAD-Lite.txt").read_text().split()
    assert {line.removeprefix("./") for line in listed} == photos
    assert list(folder.rglob("Thumbs.db"))


@pytest.mark.parametrize("kind", RECIPES)
def test_same_seed_same_bytes_with_any_number_of_processes(kind: str, tmp_path: Path) -> None:
    """T10: the result does not depend on the number of workers."""
    found = []
    for workers in (1, 2):
        folder = tmp_path / str(workers) / "set"
        generate(kind, folder, small(kind, ALONE_BELOW + 5), workers)
        found.append(digests(folder))
    assert found[0] == found[1]
    generate(kind, tmp_path / "other", small(kind, 12, seed=1))
    other = digests(tmp_path / "other")
    assert not set(other.values()) & {found[0][key] for key in found[0] if key.endswith(("png", "jpg"))}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_interrupted_drawing_goes_on_and_gives_the_same_set(how: signal.Signals, tmp_path: Path) -> None:
    num_images = 320
    folder = tmp_path / "raw" / "set"
    folder.parent.mkdir()
    process = start(folder, num_images, 2)
    partial_folder = folder.parent / ".set.partial"
    deadline = time.monotonic() + 60
    while num_drawn(partial_folder) < 40 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0, errors
    assert not folder.exists()
    time.sleep(0.5)
    drawn = num_drawn(partial_folder)
    assert 40 <= drawn < num_images, errors
    time.sleep(0.5)
    assert num_drawn(partial_folder) == drawn, "a worker outlived its parent"
    (partial_folder / "boneage-training-dataset" / "left.png.tmp-1").write_bytes(b"half")
    again = start(folder, num_images, 1)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert f"drawing {num_images - drawn} synthetic" in errors
    assert not partial_folder.exists()
    straight = tmp_path / "straight"
    generate("hands", straight, small("hands", num_images), 2)
    assert digests(folder) == digests(straight)


def test_two_processes_draw_one_set(tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "set"
    folder.parent.mkdir()
    both = [start(folder, 150, 1) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum("drawing 150 synthetic pictures" in text for text in errors) == 1
    assert num_drawn(folder) == 150
    assert not list(folder.parent.glob("*.partial"))


def fail_after(num: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writing fail with an operating system's error after some files."""
    written = iter(range(10_000))
    original = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if next(written) >= num:
            original(path, content[: len(content) // 2])
            raise OSError(number, os.strerror(number), str(path))
        return original(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_failed_write_is_one_message_and_finished_pictures_are_kept(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "raw" / "set"
    with monkeypatch.context() as patch:
        fail_after(6, number, patch)
        with pytest.raises(DataError, match=os.strerror(number)) as raised:
            generate("hands", folder, small("hands"))
    assert "dataset.root" in str(raised.value)
    assert not folder.exists()
    kept = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*.png")}
    assert len(kept) == 5  # the marker is the sixth file
    assert not list(folder.parent.rglob("*.tmp-*"))
    generate("hands", folder, small("hands"))
    after = {path.stat().st_mtime_ns for path in folder.rglob("*.png")}
    assert set(kept.values()) <= after
    generate("hands", tmp_path / "fresh", small("hands"))
    assert digests(folder) == digests(tmp_path / "fresh"), "a half-written picture was taken for whole"


def test_too_little_space_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "free_bytes", lambda folder: 1000)
    with pytest.raises(DataError, match="needed"):
        generate("hands", tmp_path / "raw" / "set", small("hands"))
    assert not list(tmp_path.rglob("*.png"))


def test_a_file_in_the_way_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("not a folder")
    with pytest.raises(DataError, match=r"dataset\.root"):
        generate("hands", tmp_path / "raw" / "set", small("hands"))


def test_lost_pictures_are_drawn_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    generate("faces", folder, small("faces"))
    before = digests(folder)
    gone, empty, *_ = sorted(folder.rglob("*.jpg"))
    gone.unlink()
    empty.write_bytes(b"")
    capfd.readouterr()
    generate("faces", folder, small("faces"))
    assert "2 pictures" in capfd.readouterr().err
    assert digests(folder) == before


def test_whole_set_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    generate("faces", folder, small("faces"))
    fail_after(0, errno.EIO, monkeypatch)
    generate("faces", folder, small("faces"))


def test_another_set_in_the_folder_is_refused_and_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    generate("faces", folder, small("faces"))
    before = digests(folder)
    newer = face_recipe(12, 0, 5.0, {**MARKER, "version": 2})
    for attempt in (lambda: generate("faces", folder, newer), lambda: matches(folder, newer.marker)):
        with pytest.raises(DataError, match="Remove or rename") as raised:
            attempt()
        assert str(folder) in str(raised.value)
    assert digests(folder) == before
    (folder / "synthetic.json").write_text("{")
    with pytest.raises(DataError, match=r"no readable synthetic\.json"):
        matches(folder, newer.marker)


def test_beginning_of_another_set_is_not_continued(tmp_path: Path) -> None:
    older = small("hands", 30, seed=9)
    partial_folder = tmp_path / ".set.partial"
    (partial_folder / "boneage-training-dataset" / "boneage-training-dataset").mkdir(parents=True)
    (partial_folder / "synthetic.json").write_text(json.dumps({**MARKER, "version": 0}))
    draw_chunk(partial_folder, older.draw, older.cases[:20])
    generate("hands", tmp_path / "set", small("hands"))
    generate("hands", tmp_path / "fresh", small("hands"))
    assert digests(tmp_path / "set") == digests(tmp_path / "fresh")
