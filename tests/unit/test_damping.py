"""The conversion of alpha between conventions."""

from __future__ import annotations

import pytest

from gramgn.damping import CONVENTIONS, alpha_from_sum, alpha_to_sum


def test_each_convention_is_relative_to_what_it_says() -> None:
    """sum: the sum G itself; mean: G / b; trace: the mean eigenvalue of G."""
    in_sum = {name: alpha_to_sum(0.5, name, num_samples=4, mean_eigenvalue=12.0) for name in CONVENTIONS}
    assert in_sum == {"sum": 0.5, "mean": 2.0, "trace": 6.0}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_both_ways_agree(convention: str) -> None:
    alpha_sum = alpha_to_sum(0.5, convention, num_samples=4, mean_eigenvalue=8.0)
    assert alpha_from_sum(alpha_sum, convention, num_samples=4, mean_eigenvalue=8.0) == 0.5


@pytest.mark.parametrize(
    ("convention", "expected"), [("average", "'sum', 'mean', 'trace'"), ("trace", "trace")]
)
def test_what_cannot_be_converted_is_an_error(convention: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        alpha_to_sum(0.5, convention, num_samples=4)
