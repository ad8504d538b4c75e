"""Fixtures of the tests that run whole command lines."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import pytest
from house import BLOBS, PLUGIN, REPOSITORY, Call, House
from omegaconf import DictConfig

import gramgn.app


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

    @hydra.main(version_base="1.3", config_path=str(REPOSITORY / "conf"), config_name="train")
    def task(config: DictConfig) -> float | None:
        return gramgn.app.run_job(config)

    def run(*overrides: str, multirun: bool = False) -> int:
        words = ["train.py", *BLOBS, *(["-m"] if multirun else []), *overrides]
        monkeypatch.setattr(sys, "argv", words)
        return gramgn.app.main(task, house.root)

    return run
