"""Fixtures of the tests that run whole command lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from house import BLOBS, PLUGIN, Call, House

from gramgn.app import train_command


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Return a fresh house."""
    return House(tmp_path / "house")


@pytest.fixture
def call(house: House, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs train.py's command line in this process, on the small outside data set."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setenv("HOME", str(house.root))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", sys.argv)

    def run(*overrides: str, multirun: bool = False) -> int:
        return train_command([*BLOBS, *(["-m"] if multirun else []), *overrides], house.root)

    return run
