"""Numbers by seed, and a statement with its numbers and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gramgn.figures.claims import Claim, Measurement
from gramgn.figures.theory.records import COMMAND, TheoryRun
from gramgn.theory.rates import fitted_exponent


def slopes(
    runs: Sequence[TheoryRun], value: Callable[[TheoryRun], float | None], size: Callable[[TheoryRun], float]
) -> dict[str, float]:
    """Return for each seed the slope of log(value) against log(size); none for a seed with fewer than two sizes.

    A value that is 0 or missing has no logarithm and takes no part.

    Args:
        runs: Of one study.
        value: e.g. a drift.
        size: e.g. the width.
    """
    found = {}
    for seed, own in by_seed(runs).items():
        points = [(size(run), number) for run in own if (number := value(run))]
        if len({at for at, _ in points}) > 1:
            found[seed] = fitted_exponent([at for at, _ in points], [number for _, number in points])
    return found


def by_seed(runs: Iterable[TheoryRun]) -> dict[str, list[TheoryRun]]:
    """Return runs by seed."""
    found: dict[str, list[TheoryRun]] = {}
    for run in runs:
        found.setdefault(str(run.setting.seed), []).append(run)
    return found


def values_of(runs: Iterable[TheoryRun], value: Callable[[TheoryRun], float | None]) -> dict[str, float]:
    """Return a number for each seed, without the seeds that have none."""
    found = {str(run.setting.seed): value(run) for run in runs}
    return {seed: number for seed, number in found.items() if number is not None}


def judged(
    key: str,
    text: str,
    figure: str,
    rule: str,
    measurements: Sequence[Measurement],
    holds: Callable[[float], bool],
    *,
    every: bool = False,
) -> Claim:
    """Return a statement with its verdict, which is about medians.

    Args:
        key: Short name.
        text: The statement.
        figure: The figure that shows it.
        rule: When it counts as seen, in words.
        measurements: What was measured; those without a value are left out.
        holds: Whether a median fulfils the rule.
        every: Whether the rule is about all numbers, not about the first.
    """
    measured = tuple(each for each in measurements if each.values)
    if not measured:
        return Claim(key, text, figure, rule, (), "not measured", f"run {COMMAND}")
    decisive = measured if every else measured[:1]
    return Claim(
        key, text, figure, rule, measured, "yes" if all(holds(each.median) for each in decisive) else "no"
    )
