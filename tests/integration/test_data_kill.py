"""Real processes that are killed, interrupted, or prepare the same set at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data_cases import snapshot, write_afad
from data_slow import SlowAFAD

from gramgn.data import AFAD

TESTS = Path(__file__).resolve().parents[1]
CODE = "import sys, data_slow; data_slow.prepare_slowly(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
PATIENCE_S = 60.0


def start(root: Path, workers: int) -> subprocess.Popen[str]:
    """Start a slow preparation in its own process group."""
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(root / "raw"), str(root / "prepared"), str(workers)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fail after a minute."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for: {what}"
        time.sleep(0.02)


def is_decoding(root: Path) -> bool:
    """Return whether a preparation has begun to write its images."""
    return bool(list((root / "prepared").glob(".*.partial/images.npy")))


def members(group: int) -> list[int]:
    """Return the living processes of a session, from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def test_kill_9_and_run_again(tmp_path: Path) -> None:
    """D02: killed, there is no set; run again, the result is as if never killed."""
    write_afad(tmp_path / "raw", 60)
    process = start(tmp_path, 2)
    wait_for(lambda: is_decoding(tmp_path), "the first image")
    process.kill()
    process.communicate()
    dataset = SlowAFAD(tmp_path / "raw", prepared_root=tmp_path / "prepared", workers=2)
    assert not dataset.prepared_folder(16).exists()
    if Path("/proc/self/stat").exists():
        wait_for(lambda: not members(process.pid), "the end of the orphaned workers")
    folder = dataset.prepare(16)
    whole = AFAD(tmp_path / "raw", prepared_root=tmp_path / "whole", workers=1).prepare(16)
    own = {"meta.json": b"", "raw.json": b""}  # they name the class
    assert snapshot(folder) | own == snapshot(whole) | own
    assert [path for path in (tmp_path / "prepared").iterdir() if path.is_dir()] == [folder]


def test_ctrl_c_stops_everything_at_once(tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches all processes: only the parent reacts, nothing stays behind, no set."""
    write_afad(tmp_path / "raw", 200)
    process = start(tmp_path, 2)
    wait_for(lambda: is_decoding(tmp_path) and len(members(process.pid)) >= 3, "the workers")
    time.sleep(1.0)  # until they decode
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - asked < 10
    assert process.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1  # the parent's own; the command lines turn it into exit code 130
    assert "KeyboardInterrupt" in said
    assert not list((tmp_path / "prepared").glob("*/meta.json"))
    if Path("/proc/self/stat").exists():
        wait_for(lambda: not members(process.pid), "the end of the workers")


def test_two_processes_prepare_one_set(tmp_path: Path) -> None:
    """The second waits for the first, says so, and uses what it made."""
    photos = write_afad(tmp_path / "raw", 60)
    first = start(tmp_path, 1)
    wait_for(lambda: is_decoding(tmp_path), "the first image")
    second = start(tmp_path, 1)
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert "waiting for it" in said[1]
    assert "already prepared" in said[1]
    (manifest,) = (tmp_path / "prepared").glob("*/manifest.csv")
    assert len(manifest.read_text().splitlines()) == 1 + len(photos)
