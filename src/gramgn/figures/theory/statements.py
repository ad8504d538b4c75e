"""What the theorems and the cost analysis say, each beside the numbers that the theory's studies measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from gramgn.figures.claims import Claim, Measurement
from gramgn.figures.theory.costs import cost_claims
from gramgn.figures.theory.judge import judged, slopes, values_of
from gramgn.figures.theory.records import STUDIES_OF_RUNS, Theory, TheoryRun

NARROW = 512
"""Widths up to which the order is read off: wider networks are at rounding after too few steps."""


def theory_title(theory: Theory) -> str:
    """Return what stands above the theory's claims: what they were measured on.

    Args:
        theory: The studies' rows.
    """
    kinds = {(run.setting.kind, run.setting.dataset) for run in theory.runs}
    data = sorted(f"SYNTHETIC {name}" if kind == "synthetic" else f"{name} ({kind})" for kind, name in kinds)
    parts = [*data, *(["what the parts of a step cost"] if theory.costs else [])]
    return f"The theory: {', and '.join(parts)}"


def theory_claims(theory: Theory) -> list[Claim]:
    """Return every statement of the theory with what was measured.

    A verdict is about the median of the first number over seeds (costs: over rounds); rules are from numerical
    experience where the paper only bounds.

    Args:
        theory: The studies' rows.
    """
    quadratic, cyclic, methods = (theory.study(name) for name in STUDIES_OF_RUNS)
    return [
        _order(quadratic),
        *_slopes(quadratic),
        *_contractions(cyclic),
        *_methods(methods),
        *cost_claims(theory.costs),
    ]


def _width(run: TheoryRun) -> float:
    return run.setting.M


def _order(runs: Sequence[TheoryRun]) -> Claim:
    measured = []
    for M in sorted({run.setting.M for run in runs if run.setting.M <= NARROW}):
        orders = {
            str(run.setting.seed): run.order_of_convergence
            for run in runs
            if run.setting.M == M and run.order_of_convergence is not None
        }
        measured.append(Measurement(f"order of convergence of the last step above rounding, M = {M}", orders))
    # The widest first: the theorem is about wide networks.
    return judged(
        "order",
        "Theorem 1: with the full batch, λ = 1 and α = 0, |f - y| falls quadratically",
        "T1",
        "the order is from 1.9 to 2.1 in the median over seeds",
        measured[::-1],
        lambda median: 1.9 <= median <= 2.1,
    )


def _slopes(runs: Sequence[TheoryRun]) -> list[Claim]:
    fast = ("at most -0.4; about -1 where the random signs a cancel", lambda median: median <= -0.4)
    half = ("from -0.6 to -0.4", lambda median: -0.6 <= median <= -0.4)
    rows: tuple[
        tuple[str, str, str, Callable[[TheoryRun], float | None], tuple[str, Callable[[float], bool]]], ...
    ] = (
        (
            "constant",
            "Theorem 1: |f_2 - y| / |f_1 - y|² falls at least as fast as M^(-1/2)",
            "that ratio",
            lambda run: run.constant,
            fast,
        ),
        (
            "drift_G",
            "Lemma: |G - G_0| falls at least as fast as M^(-1/2)",
            "|G - G_0| at the end",
            lambda run: run.epochs[-1].drift_G,
            fast,
        ),
        (
            "drift_J",
            "Lemma: |J - J_0| falls as M^(-1/2)",
            "|J - J_0| at the end",
            lambda run: run.epochs[-1].drift_J,
            half,
        ),
        (
            "kernel_gap",
            "Lemma: |G_0 - K| falls as M^(-1/2)",
            "|G_0 - K|",
            lambda run: run.setting.kernel_gap,
            half,
        ),
    )
    return [
        judged(
            key,
            text,
            "T2",
            f"the slope is {rule}",
            [Measurement(f"slope of log {name} against log M", slopes(runs, value, _width))],
            holds,
        )
        for key, text, name, value, (rule, holds) in rows
    ]


def relative_rate(run: TheoryRun, predicted: float | None) -> float | None:
    """Return (1 - c) / (1 - rho) - 1 for a run's contraction c, `None` if either is missing."""
    c = run.contraction
    return None if c is None or predicted is None or predicted >= 1 else (1 - c) / (1 - predicted) - 1


def _contractions(runs: Sequence[TheoryRun]) -> list[Claim]:
    cells: dict[tuple[int, int], dict[str, list[TheoryRun]]] = {}
    for run in runs:
        at = cells.setdefault((run.setting.M, run.setting.b), {"cyclic": [], "shuffle": []})
        at[run.setting.order].append(run)
    # The widest first: the rules are about it.
    widest = f", {max(M for M, _ in cells):,}" if cells else ""
    against_rho, against_A, random = [], [], []
    for (M, b), at in sorted(cells.items(), key=lambda cell: (-cell[0][0], cell[0][1])):
        name = f"M = {M}, b = {b}"
        measured = values_of(at["cyclic"], lambda run: run.contraction)
        of_rho = values_of(at["cyclic"], lambda run: relative_rate(run, run.setting.rho))
        of_A = values_of(at["cyclic"], lambda run: relative_rate(run, run.linear_contraction))
        rho = values_of(at["cyclic"], lambda run: run.setting.rho)
        if rho:
            name_rho = f"{name} (median ρ {statistics.median(rho.values()):.3f})"
            against_rho.append(Measurement(f"(1 - c) / (1 - ρ) - 1, {name_rho}", of_rho))
            against_A.append(Measurement(f"(1 - c) / (1 - c_A) - 1, {name}", of_A))
        if at["shuffle"]:
            cyclic = f"; in cyclic order {statistics.median(measured.values()):.3f}" if measured else ""
            shuffled = values_of(at["shuffle"], lambda run: run.contraction)
            random.append(Measurement(f"contraction an epoch in random order, {name}{cyclic}", shuffled))
    return [
        judged(
            "contraction",
            "Theorem 2: with fixed mini-batches in a fixed order |f - y| falls by ρ(A) an epoch",
            "T3",
            f"|(1 - c) / (1 - ρ) - 1| is at most 5 % in the median over seeds at the largest width{widest}; c is "
            "the geometric mean over the second half of the epochs",
            against_rho,
            lambda median: abs(median) <= 0.05,
        ),
        judged(
            "contraction_A",
            "The network follows the linear iteration r <- A r over the same epochs",
            "T3",
            "|(1 - c) / (1 - c_A) - 1| is at most 1 % at the largest width; c_A is the contraction of A^t r_0",
            against_A,
            lambda median: abs(median) <= 0.01,
        ),
        judged(
            "shuffle",
            "Not in the paper: random order converges linearly as well",
            "T3",
            "the contraction is below 1",
            random,
            lambda median: median < 1,
        ),
    ]


def _methods(runs: Sequence[TheoryRun]) -> list[Claim]:
    descent = [run for run in runs if run.setting.method == "gradient_descent"]
    relaxed = [
        run
        for run in runs
        if run.setting.method == "ggn" and (run.setting.lam, run.setting.alpha) != (1.0, 0.0)
    ]
    last = max((run.setting.epochs for run in descent), default=0)
    gd = [
        Measurement(
            "contraction of gradient descent a step over that predicted, at its best learning rate",
            values_of(descent, _over_linear),
        ),
        Measurement(
            "that contraction",
            values_of(descent, lambda run: run.contraction),
        ),
        Measurement(
            f"|f - y| / |f_0 - y| after {last} steps of gradient descent",
            values_of(descent, lambda run: run.remaining(last)),
        ),
    ]
    ggn = [run for run in runs if run.setting.method == "ggn" and run not in relaxed]
    gd.append(
        Measurement(
            "|f - y| / |f_0 - y| after 4 steps of GGN",
            values_of(ggn, lambda run: run.remaining(4)),
        )
    )
    measured = []
    for lam, alpha in sorted({(run.setting.lam or 0.0, run.setting.alpha or 0.0) for run in relaxed}):
        own = [run for run in relaxed if (run.setting.lam, run.setting.alpha) == (lam, alpha)]
        rho = statistics.median(run.setting.rho or 0.0 for run in own)
        measured.append(
            Measurement(
                f"contraction a step with λ = {lam:g}, α = {alpha:g}, over that predicted (ρ {rho:.3f})",
                values_of(own, _over_linear),
            )
        )
    near: tuple[str, Callable[[float], bool]] = (
        "is within 5 % of 1",
        lambda median: abs(median - 1) <= 0.05,
    )
    return [
        judged(
            "descent",
            "Gradient descent converges linearly, GGN quadratically",
            "T4",
            f"the first number {near[0]}",
            gd,
            near[1],
        ),
        judged(
            "relaxed",
            "Away from λ = 1, α = 0 GGN converges linearly",
            "T4",
            f"each {near[0]}",
            measured,
            near[1],
            every=True,
        ),
    ]


def _over_linear(run: TheoryRun) -> float | None:
    if run.contraction is None or run.linear_contraction is None:
        return None
    return run.contraction / run.linear_contraction
