"""The package installs with the compiled kernels where it can, and without them where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = "src/gramgn/optim/kernels"


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """Return a folder with what building the kernels needs, without a library."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, tmp_path / name)
    shutil.copytree(
        repository / KERNELS, tmp_path / KERNELS, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copy(repository / "src/gramgn/__init__.py", tmp_path / "src/gramgn/__init__.py")
    return tmp_path


def build(checkout: Path, **environment: str) -> tuple[str, list[Path]]:
    """Return what setuptools printed, and the libraries that are next to the sources then."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, list((checkout / KERNELS).glob("library*"))


def test_without_a_compiler_there_is_no_library_and_no_failure(checkout: Path) -> None:
    text, libraries = build(checkout, CC="no-such-compiler", CXX="no-such-compiler")
    assert "building extension" in text
    assert libraries == []


def test_sources_that_do_not_compile_are_no_failure_either(checkout: Path) -> None:
    if shutil.which(os.environ.get("CXX") or "c++") is None:
        pytest.skip("there is no C++ compiler")
    (checkout / KERNELS / "kernels.cpp").write_text("this is not C++\n")
    text, libraries = build(checkout)
    assert "failed" in text
    assert libraries == []
