"""Fixtures of the tests with several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from house import House
from pipeline_runs import launch, server

__all__ = ["launch", "server"]


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Return a fresh house."""
    return House(tmp_path / "house")
