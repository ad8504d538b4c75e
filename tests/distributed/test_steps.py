"""Steps of several ranks, compared with those of one process."""

from __future__ import annotations

from pathlib import Path

import joint_steps
import pytest
from spawn import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_every_option_takes_the_step_of_one_process(size: int, tmp_path: Path) -> None:
    """With uneven shares, and a rank without samples, in float64."""
    assert run_ranks(size, joint_steps.compare, tmp_path) == [{}] * size
