"""docs/theory.md and the published numbers of the theory say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gramgn.figures import Claim, Theory, claims_text, read_runs, theory_claims, theory_title


@pytest.fixture(scope="module")
def theory(repository: Path) -> Theory:
    """Return the published rows."""
    files = sorted((repository / "outputs" / "results").glob("theory_*.csv"))
    assert len(files) == 4
    return read_runs(*files).theory


@pytest.fixture(scope="module")
def published(theory: Theory) -> dict[str, Claim]:
    """Return the statements with the published numbers."""
    return {claim.key: claim for claim in theory_claims(theory)}


def test_the_page_holds_every_statement_as_printed(repository: Path, theory: Theory) -> None:
    page = (repository / "docs" / "theory.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown == claims_text(theory_title(theory), theory_claims(theory))
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("order", 1.9, 2.1),
        ("constant", -1.1, -0.9),
        ("drift_G", -1.1, -0.9),
        ("drift_J", -0.6, -0.4),
        ("kernel_gap", -0.6, -0.4),
        ("contraction", -0.05, 0.05),
        ("contraction_A", -0.01, 0.01),
    ],
)
def test_published_numbers_are_where_they_should_be(
    published: dict[str, Claim], key: str, low: float, high: float
) -> None:
    claim = published[key]
    assert claim.verdict == "yes"
    assert len(claim.measurements[0].values) == 8
    assert low <= claim.measurements[0].median <= high


def test_numbers_in_the_text_are_the_published_ones(repository: Path, published: dict[str, Claim]) -> None:
    """The slopes of the page's table."""
    page = (repository / "docs" / "theory.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*?\| .*?\| (-[\d.]+) \((-[\d.]+) to (-[\d.]+)\) \|$", page, re.MULTILINE)
    expected = []
    for key in ("constant", "drift_G", "drift_J", "kernel_gap"):
        measured = published[key].measurements[0]
        values = measured.values.values()
        expected.append(tuple(f"{value:.2f}" for value in (measured.median, min(values), max(values))))
    assert rows == expected
