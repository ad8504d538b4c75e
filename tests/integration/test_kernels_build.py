"""The package installs with the compiled kernels where it can, and without them where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gramgn.optim import kernels

KERNELS = "src/gramgn/optim/kernels"


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """Return a folder with what building the kernels needs, without a library."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile", "requirements.lock"):
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
    return done.stdout + done.stderr, list((checkout / KERNELS).glob("compiled*"))


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


@pytest.fixture
def environment(checkout: Path) -> Path:
    """Return an environment, as `make env` leaves it, whose Python is this one."""
    folder = checkout / "environment"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / ".gramgn-ready").touch()
    return folder


def make(target: str, environment: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    # Not as a part of the make that runs the tests.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", target, f"VENV={environment}"],
        cwd=environment.parent,
        env=outside | {"CC": compiler, "CXX": compiler},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(kernels.missing() is not None, reason=str(kernels.missing()))
def test_a_build_that_fails_leaves_the_library_of_before(
    checkout: Path, environment: Path, repository: Path
) -> None:
    (built,) = (repository / KERNELS).glob("compiled*.so")
    library = Path(shutil.copy(built, checkout / KERNELS / built.name))
    for target, status in (("env", 0), ("kernels", 2)):
        done = make(target, environment, "false")
        assert done.returncode == status
        assert "do not compile" in done.stderr
        assert "the present ones are up to date and stay in use" in done.stderr
        assert library.read_bytes() == built.read_bytes()
    (checkout / KERNELS / "kernels.cpp").write_text("// changed since\n")
    done = make("env", environment, "no-such-compiler")
    assert done.returncode == 0
    assert done.stderr == (
        "the compiled kernels are not built, since there is no C++ compiler (no-such-compiler); everything works "
        "without them, but takes longer\n"
    )
    assert list((checkout / "build").glob("kernels.*")) == [checkout / "build/kernels.log"]


def test_a_library_is_replaced_as_a_whole(checkout: Path, environment: Path) -> None:
    """A process that has loaded the library, or is about to, never sees half of another one."""
    compiler = checkout / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo new > "$2"\n')
    compiler.chmod(0o755)
    library = checkout / KERNELS / f"compiled{sysconfig.get_config_var('EXT_SUFFIX')}"
    library.write_text("old")
    with library.open() as in_use:
        done = make("kernels", environment, str(compiler))
        assert done.returncode == 0, done.stderr
        assert in_use.read() == "old"
    assert library.read_text() == "new\n"
    assert done.stdout + done.stderr == ""
