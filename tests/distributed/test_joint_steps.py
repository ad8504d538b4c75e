"""Steps of several ranks on this machine, compared with those of one process.

All checks of one number of ranks run in one start of its processes, because starting torch costs the most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import joint_checks
import pytest
from spawn import run_ranks

Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """Return what each rank found."""
    return run_ranks(request.param, joint_checks.everything, tmp_path_factory.mktemp("ranks"))


def test_every_option_takes_the_step_of_one_process(found: Found) -> None:
    """G22: with uneven shares and ranks without samples, in float64."""
    assert [each["compare"] for each in found] == [{}] * len(found)


def test_an_error_on_one_rank_is_raised_on_all(found: Found) -> None:
    last = len(found) - 1
    for rank, each in enumerate(each["errors"] for each in found):
        assert each["closure"] == "KeyError: 'image 7'" if rank == last else "image 7" in each["closure"]
        # What is a ValueError on one rank is one on the others.
        assert each["kind"].startswith("UnicodeDecodeError: " if rank == last else "ValueError: ")
        assert "too large" in each["trial"]
        assert each["solve"].startswith("SolveError: ")
        assert "out of memory" in each["exchange"]
        assert "alpha must be" in each["settings"]
        assert "has a sample" in each["no samples"]
        assert f"rank {last} of {last + 1}" in each["closure"] or rank == last
        assert not each["moved"]
        assert each["afterwards"] == each["in the end"] == "cholesky"


def test_a_step_that_is_not_finite_on_one_rank_moves_no_rank(found: Found) -> None:
    assert [each["not_finite"] for each in found] == [("non_finite", True, 1)] * len(found)


def test_ranks_stay_equal_to_the_last_bit(found: Found) -> None:
    assert all(each["equal_bits"] for each in found)


def test_float32_loses_no_more_than_one_process_does(found: Found) -> None:
    assert max(each["single_precision"] for each in found) <= 1.5


def test_bytes_are_those_of_the_formula(found: Found) -> None:
    sent, expected = found[0]["sent_bytes"]
    assert sent == pytest.approx(expected, rel=0.01)


def test_convolutions_formed_in_two_ways_give_one_step(found: Found) -> None:
    assert [each["other_layouts"] for each in found] == [{}] * len(found)


def test_wrong_programs_are_noticed(found: Found) -> None:
    assert all(found[0]["wrong_programs"].values()), found[0]["wrong_programs"]


def test_copies_stay_in_the_group(found: Found) -> None:
    assert all(all(each["copies"].values()) for each in found), found


def test_ranks_that_do_not_fit_together_are_rejected_on_all(found: Found) -> None:
    for each in (each["unlike_ranks"] for each in found):
        assert "parameter groups or options" in each["options"]
        assert "other values of the parameters" in each["values"]
        assert each["network"].startswith("ValueError")
        assert each["modules"].startswith("ValueError")
        assert "numbers of residuals per sample" in each["residuals"]
        assert "DistributedDataParallel" in each["wrapped"]
        assert "is for one output per sample" in each["least"]
        assert each["auto"] == found[0]["unlike_ranks"]["auto"]
        assert re.search(
            r"rows of J of its own samples, which takes at least .* \(\d+ bytes\)", each["budget"]
        )


def test_other_groups_of_processes(found: Found) -> None:
    for rank, each in enumerate(each["groups_of_ranks"] for each in found):
        assert each["mesh"] == 3 * len(found)
        assert each["alone"] == 3
        assert "2 dimensions" in each["square"]
        assert each["outside"] == "nothing" if rank == 0 else "not part of" in each["outside"]
        assert "got int" in each["number"]
