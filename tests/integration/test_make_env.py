"""make: an environment belongs to one checkout, and is neither taken over nor used by another one in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from house import REPOSITORY

# Answers like the Python of an environment that gramgn of the checkout in the file `owner` is installed in.
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
    *direct_url*) cat "$here/owner" ;;
    *) echo "$@" >> "$here/calls" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return an environment of the checkout `other`, next to the checkout `mine`."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "setup.py"):
        shutil.copy(REPOSITORY / name, tmp_path / "mine")
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    (folder / "bin" / "owner").write_text(f"{tmp_path / 'other'}\n")
    return folder


def make(environment: Path, *words: str) -> tuple[int, str, bool]:
    """Return exit code and messages of `make env`, and whether it installed this checkout."""
    calls = environment / "bin" / "calls"
    calls.unlink(missing_ok=True)
    # Not as a part of the make that runs the tests.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "env", f"VENV={environment}", *words],
        cwd=environment.parent / "mine",
        env=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr, calls.is_file() and "install" in calls.read_text()


@pytest.mark.parametrize("mark", ["none", "old", "new"])
def test_the_environment_of_another_checkout(environment: Path, mark: str) -> None:
    """A mark newer than this checkout's files would have let make run the other checkout's code."""
    ready = environment / ".gramgn-ready"
    if mark == "new":
        ready.write_text(f"{environment.parent / 'other'}\n")
    elif mark == "old":
        ready.touch()
        os.utime(ready, (1e9, 1e9))
    code, words, installed = make(environment)
    assert (code, installed) == (2, False)
    assert f"is the environment of the checkout {environment.parent / 'other'}" in words
    code, words, installed = make(environment, "ADOPT=yes")
    assert (code, installed) == (0, True), words
    assert ready.read_text() == f"{environment.parent / 'mine'}\n"
    assert make(environment)[2] is False


def test_a_checkout_that_was_moved_is_installed_again(environment: Path) -> None:
    """Its environment would look for the package in the old place."""
    (environment / "bin" / "owner").write_text("/no/such/folder\n")
    (environment / ".gramgn-ready").write_text("/no/such/folder\n")
    code, words, installed = make(environment)
    assert (code, installed) == (0, True), words
