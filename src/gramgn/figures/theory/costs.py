"""The cost analysis beside the measured parts of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from gramgn.figures.claims import Claim, Measurement
from gramgn.figures.theory.judge import judged
from gramgn.figures.theory.records import Cost
from gramgn.theory.rates import fitted_exponent

PAPERS_SHAPE = (64, 128)
"""Height and width of the images, samples in the batch."""


def cost_claims(costs: Sequence[Cost]) -> list[Claim]:
    """Return what the paper says of parts (A) and (B) of a step, with what was measured."""
    over_b, over_m = cost_axes(costs)
    parts: tuple[tuple[str, Callable[[Cost], float]], ...] = (
        ("(A), forward and per-sample backward", lambda cost: cost.part_A_s),
        ("(B), Gram product and solve", lambda cost: cost.part_B_s),
        ("the Gram product", lambda cost: cost.gram_s),
        ("the solve", lambda cost: cost.solve_s),
    )
    exponents = [
        Measurement(f"exponent of {axis} in the time of {name}", _exponents(rows, size, seconds), "round")
        for rows, axis, size in (
            (over_b, "b", lambda cost: cost.b),
            (over_m, "m", lambda cost: cost.m),
        )
        for name, seconds in parts
        if not (axis == "m" and name == "the solve")
    ]
    # The largest images first: the rules are about them, and in the whole study they are the paper's.
    shapes = sorted({(-cost.pixels, cost.b, cost.network, cost.m) for cost in costs})
    named = {
        f"{network}, {-pixels}x{-pixels}, b = {b}, m = {m:,}": [
            cost for cost in costs if (cost.network, cost.pixels, cost.b) == (network, -pixels, b)
        ]
        for pixels, b, network, m in shapes
    }
    is_papers = any((-pixels, b) == PAPERS_SHAPE for pixels, b, *_ in shapes[:1])
    at = "the paper's shape, the first" if is_papers else "the first shape"
    shares, ratios = (
        [Measurement(f"{what}, {name}", _by_round(own, value), "round") for name, own in named.items()]
        for what, value in (
            ("part (B) over the whole step", lambda cost: cost.part_B_s / cost.step_s),
            ("part (A) over a step of SGD", lambda cost: cost.part_A_s / cost.sgd_s),
        )
    )
    return [
        judged(
            "cost_A",
            "Part (A) of a step, forward and per-sample backward, is of the order of SGD's step",
            "T5",
            f"at most twice SGD's step at {at}",
            ratios,
            lambda median: median <= 2,
        ),
        judged(
            "cost_B",
            "Part (B), b²m + b³, is small for ordinary b",
            "T5",
            f"at most a tenth of the step at {at}",
            shares,
            lambda median: median <= 0.1,
        ),
        judged(
            "exponents",
            "The time of (A) grows as b, that of the Gram product as b² m, that of the solve as b³",
            "T5",
            "the first number, of (A) in b, is from 0.8 to 1.2; fixed costs of small products lower the others",
            exponents,
            lambda median: 0.8 <= median <= 1.2,
        ),
    ]


def _by_round(costs: Sequence[Cost], value: Callable[[Cost], float]) -> dict[str, float]:
    return {str(cost.round): value(cost) for cost in costs}


def cost_axes(costs: Sequence[Cost]) -> tuple[list[Cost], list[Cost]]:
    """Return the rows over b of the network that most batch sizes were timed for, and those over m at one b.

    Both on images of the size that most rows have.
    """
    if not costs:
        return [], []
    pixels = statistics.mode(cost.pixels for cost in costs)
    rows = [cost for cost in costs if cost.pixels == pixels]
    batches: dict[str, set[int]] = {}
    networks: dict[int, set[str]] = {}
    for cost in rows:
        batches.setdefault(cost.network, set()).add(cost.b)
        networks.setdefault(cost.b, set()).add(cost.network)
    network = max(batches, key=lambda name: len(batches[name]))
    b = max(networks, key=lambda size: len(networks[size]))
    return [cost for cost in rows if cost.network == network], [cost for cost in rows if cost.b == b]


def _exponents(
    costs: Sequence[Cost], size: Callable[[Cost], float], seconds: Callable[[Cost], float]
) -> dict[str, float]:
    found = {}
    for turn in sorted({cost.round for cost in costs}):
        own = [cost for cost in costs if cost.round == turn]
        if len({size(cost) for cost in own}) > 1 and all(seconds(cost) > 0 for cost in own):
            found[str(turn)] = fitted_exponent([size(cost) for cost in own], [seconds(cost) for cost in own])
    return found
