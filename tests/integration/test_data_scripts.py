"""The command lines around the data sets, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_cases import STEM, tar_of, write_afad, write_kaggle, write_parts, write_png


def run(repository: Path, script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script from another folder."""
    command = [sys.executable, str(repository / "scripts" / script), *arguments]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=120)


def test_prepare_a_data_set(repository: Path, tmp_path: Path) -> None:
    """D01: prints the prepared folder; says what was made and what was not used."""
    write_kaggle(tmp_path / "raw")
    prepared = f"dataset.prepared_root={tmp_path / 'prepared'}"
    done = run(
        repository,
        "prepare_data.py",
        "dataset=rsna",
        f"dataset.root={tmp_path / 'raw'}",
        prepared,
        "image_size=16",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path / "prepared"
    assert (folder / "images.npy").stat().st_size == 128 + 40 * 16 * 16
    assert "prepared 40 images" in done.stderr
    assert "4 x no bone age in this distribution" in done.stderr
    options = ["dataset=rsna", f"dataset.root={tmp_path / 'raw'}", prepared, "image_size=16", "--check"]
    assert f"as it was written: {folder}" in run(repository, "prepare_data.py", *options, cwd=tmp_path).stdout
    (folder / "images.npy").write_bytes(bytes(128 + 40 * 16 * 16))
    done = run(repository, "prepare_data.py", *options, cwd=tmp_path)
    assert (done.returncode, "images.npy differs from what was written" in done.stderr) == (2, True)


@pytest.mark.parametrize("content", ["loose images", "bad image", "bad option", "doubled key"])
def test_bad_input_is_one_message(repository: Path, tmp_path: Path, content: str) -> None:
    """D01: exit code 2, one message, no traceback, nothing that looks like a finished set."""
    raw = tmp_path / "raw"
    raw.mkdir()
    if content == "loose images":
        write_png(raw, (1, 2))
    if content == "bad image":
        write_afad(raw, 4)
        (raw / "20" / "111").mkdir(parents=True, exist_ok=True)
        (raw / "20" / "111" / "7-0.jpg").write_bytes(b"")
    options = [f"dataset.root={raw}", f"dataset.prepared_root={tmp_path / 'prepared'}", "image_size=16"]
    if content == "bad option":
        options.append("dataset.variant=light")
    if content == "doubled key":
        options.append("image_size=32")
    done = run(repository, "prepare_data.py", "dataset=afad", *options, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    words = {
        "bad option": "lite, full",
        "doubled key": "image_size is given twice: image_size=16 and image_size=32",
    }
    assert words.get(content, str(raw)) in done.stderr
    assert not list(tmp_path.glob("prepared/*/meta.json"))


def test_archive_parts_are_checked_against_the_published_hashes(repository: Path, tmp_path: Path) -> None:
    """D02: parts that are not the published ones are rejected by name."""
    write_parts(tmp_path / "parts", tar_of(("AFAD-Lite/18/111/1-0.jpg", b"x")))
    options = [f"dataset.root={tmp_path / 'raw'}", f"archive={tmp_path / 'parts'}"]
    done = run(repository, "prepare_data.py", "dataset=afad", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert f"23 of 28 archive parts are missing in {tmp_path / 'parts'}: {STEM}af" in done.stderr


def test_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    write_png(tmp_path / "images", range(4))
    arguments = ["--images", str(tmp_path / "images"), "--workers", "1", "--num", "6"]
    done = run(repository, "../benchmarks/prepare.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("images/s") == 5
