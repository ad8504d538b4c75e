"""The claims of the paper as the page shows them; what was measured is computed by ``gramgn.figures``."""

from __future__ import annotations

from dataclasses import dataclass

from gramgn.figures import Claim, FigureSet, Measurement, Theory, claims, theory_claims, theory_title

from ._alt import set_title
from ._table import NOTHING, number_text

_MARKS = {"yes": "holds", "no": "fails", "mixed": "fails"}


@dataclass(frozen=True)
class Number:
    """One measured number as text.

    Attributes:
        name: What was measured.
        median: Median over seeds.
        least: The least of a seed.
        greatest: The greatest of a seed.
        seeds: Number of seeds, or of what else there is a value for each of, with its name.
    """

    name: str
    median: str
    least: str
    greatest: str
    seeds: str


@dataclass(frozen=True)
class ClaimRow:
    """One claim with its numbers.

    Attributes:
        text: The claim.
        figures: The panels that show it.
        rule: When it counts as seen here.
        note: What limits the number; may be empty.
        verdict: ``"yes"``, ``"no"``, ``"mixed"`` or ``"not measured"``.
        mark: Style class of the verdict.
        numbers: What was measured; a single line of dashes if nothing was.
    """

    text: str
    figures: str
    rule: str
    note: str
    verdict: str
    mark: str
    numbers: list[Number]


@dataclass(frozen=True)
class ClaimGroup:
    """All claims on one data kind, scale and device.

    Attributes:
        title: Data kind, scale and device.
        claims: In the order of the paper.
    """

    title: str
    claims: list[ClaimRow]


def claim_groups(sets: list[FigureSet], theory: Theory) -> list[ClaimGroup]:
    """Return the claims, measured in each figure set, and those of the theory.

    Args:
        sets: Figure sets.
        theory: What the theory's studies measured.
    """
    found = [ClaimGroup(set_title(figures), [_row(claim) for claim in claims(figures)]) for figures in sets]
    if theory:
        found.append(ClaimGroup(theory_title(theory), [_row(claim) for claim in theory_claims(theory)]))
    return found


def _row(claim: Claim) -> ClaimRow:
    numbers = [_number(measurement) for measurement in claim.measurements]
    nothing = Number("not measured", NOTHING, NOTHING, NOTHING, "0")
    mark = _MARKS.get(claim.verdict, "")
    note = claim.note[:1].upper() + claim.note[1:].rstrip(".")
    return ClaimRow(claim.text, claim.figures, claim.rule, note, claim.verdict, mark, numbers or [nothing])


def _number(measurement: Measurement) -> Number:
    values = measurement.values.values()
    median, least, greatest = map(number_text, (measurement.median, min(values), max(values)))
    count = str(len(values)) if measurement.unit == "seed" else f"{len(values)} {measurement.unit}s"
    return Number(measurement.name, median, least, greatest, count)
