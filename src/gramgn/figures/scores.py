"""Numbers that compare GGN with the better of the two SGD baselines, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ._panels import FigureSet
from ._run import Run

Score = Callable[[Run, Sequence[Run]], float]


def paired(figures: FigureSet, family: str, score: Score) -> dict[str, float]:
    """Return a score of GGN against both SGD baselines, for each seed that has all three.

    Args:
        figures: The figure set.
        family: ``"afad"`` or ``"rsna"``.
        score: From GGN's run and the two baselines to a number.
    """
    baselines = [
        {run.seed: run for run in named(figures, family, curve)} for curve in ("sgd_bn", "sgd_fixup")
    ]
    return {
        run.seed: score(run, [found[run.seed] for found in baselines])
        for run in named(figures, family, "ggn_fixup")
        if all(run.seed in found for found in baselines)
    }


def ratio_at_last_epoch(column: str) -> Score:
    """Return the score "better baseline's value over GGN's at the last epoch that all runs have".

    Args:
        column: A loss of ``metrics.csv``.
    """

    def score(ggn: Run, baselines: Sequence[Run]) -> float:
        # A run that diverged is infinite from there on; it does not shorten the others.
        epoch = min((num_epochs(run) for run in (ggn, *baselines) if not run.diverged), default=0)
        return _ratio([_at(run, column, lambda row: row["epoch"] <= epoch) for run in (*baselines, ggn)])

    return score


def ratio_at_equal_time(column: str) -> Score:
    """Return the score "better baseline's value over GGN's at the second of training the first of them ends".

    Args:
        column: A loss of ``metrics.csv``; a run's value is that of its last whole epoch until then.
    """

    def score(ggn: Run, baselines: Sequence[Run]) -> float:
        ends = [run.rows[-1]["train_s"] or 0.0 for run in (ggn, *baselines) if not run.diverged]
        time = min(ends, default=0.0)
        return _ratio([_at(run, column, lambda row: row["train_s"] <= time) for run in (*baselines, ggn)])

    return score


def _ratio(losses: Sequence[float]) -> float:
    """Return the least of the baselines over the last, GGN's; 0 where GGN diverged, infinite where they did."""
    *baselines, ggn = losses
    if math.isinf(ggn):
        return 0.0
    return min(baselines) / ggn if ggn > 0 else math.inf


def speed(ggn: Run, baselines: Sequence[Run]) -> float:
    """Return how many times sooner GGN gets to the baselines' least test loss than the baseline did.

    Args:
        ggn: GGN's run.
        baselines: SGD's.

    Returns:
        Ratio of seconds of training; 0 if GGN never gets there, infinite if no baseline has a test loss.
    """
    reached = [(loss, row["train_s"]) for run in baselines if not run.diverged for loss, row in _points(run)]
    if not reached:
        return math.inf
    level, seconds = min(reached)
    own = [row["train_s"] for loss, row in _points(ggn) if loss <= level] if not ggn.diverged else []
    return seconds / own[0] if own and own[0] else 0.0


def _points(run: Run) -> list[tuple[float, Mapping[str, float]]]:
    rows = [row for row in run.rows if row["test_loss"] is not None and math.isfinite(row["test_loss"])]
    return [(float(row["test_loss"] or 0.0), {"train_s": float(row["train_s"] or 0.0)}) for row in rows]


def _at(run: Run, column: str, is_before: Callable[[Mapping[str, float]], bool]) -> float:
    """Return the last value up to a time or epoch; infinite if the run diverged or has none."""
    if run.diverged:
        return math.inf
    found = math.inf
    for row in run.rows:
        value = row[column]
        times = {"epoch": float(row["epoch"] or 0), "train_s": float(row["train_s"] or 0.0)}
        if value is not None and math.isfinite(value) and is_before(times):
            found = float(value)
    return found


def named(figures: FigureSet, family: str, curve: str) -> list[Run]:
    """Return the runs of one of the paper's curves, e.g. of ``fig1/afad_sgd_bn``."""
    return [run for run in figures.runs(family) if run.experiment == f"fig1/{family}_{curve}"]


def losses_of(run: Run, column: str, epochs: int) -> list[float]:
    """Return the finite values up to an epoch; none of a run that diverged."""
    if run.diverged:
        return []
    values = [row[column] for row in run.rows if (row["epoch"] or 0) <= epochs]
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def num_epochs(run: Run) -> int:
    """Return the last epoch of a run, 0 if it has none."""
    return int(run.rows[-1]["epoch"] or 0) if run.rows else 0
