"""What the theorems and the cost analysis say, each next to the numbers that the theory's studies measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from gramgn.figures.claims import Claim, Measurement
from gramgn.figures.theory.table import (
    STUDIES_OF_RUNS,
    Theory,
    cost_axes,
    median,
    slopes,
    values_by,
    with_parts,
)

NARROW = 512
"""Widths up to which the order is read off: wider networks are at rounding after too few steps."""
PAPERS_SHAPE = (64, 128)
"""Height and width of the images, samples in the batch."""


def theory_title(theory: Theory) -> str:
    """Return what stands above the theory's claims: what they were measured on."""
    kinds = theory.runs[["kind", "dataset"]].drop_duplicates().itertuples(index=False)
    data = sorted(f"SYNTHETIC {name}" if kind == "synthetic" else f"{name} ({kind})" for kind, name in kinds)
    parts = [*data, *(["what the parts of a step cost"] if len(theory.costs) else [])]
    return f"The theory: {', and '.join(parts)}"


def theory_claims(theory: Theory) -> list[Claim]:
    """Return every statement of the theory with what was measured.

    A verdict is about the median of the first number over seeds (costs: over rounds); rules are from numerical
    experience where the paper only bounds.
    """
    quadratic, cyclic, methods = (theory.study(name) for name in STUDIES_OF_RUNS)
    return [
        _order(quadratic),
        *_slopes(quadratic),
        *_contractions(cyclic),
        *_methods(methods),
        *_costs(with_parts(theory.costs)),
    ]


def _order(runs: pd.DataFrame) -> Claim:
    name = "order of convergence of the last step above rounding, M = {}"
    measured = [
        Measurement(name.format(M), values_by(own, own.convergence_order))
        for M, own in runs[runs.M <= NARROW].groupby("M")
    ]
    # The widest first: the theorem is about wide networks.
    return _judged(
        "order",
        "Theorem 1: with the full batch, λ = 1 and α = 0, |f - y| falls quadratically",
        "T1",
        "the order is from 1.9 to 2.1 in the median over seeds",
        measured[::-1],
        lambda value: 1.9 <= value <= 2.1,
    )


def _slopes(runs: pd.DataFrame) -> list[Claim]:
    def claim(
        key: str, text: str, name: str, low: float = -float("inf"), rule: str = "from -0.6 to -0.4"
    ) -> Claim:
        measured = [Measurement(f"slope of log {name} against log M", slopes(runs, key, "M"))]
        return _judged(key, text, "T2", f"the slope is {rule}", measured, lambda value: low <= value <= -0.4)

    fast = "at most -0.4; about -1 where the random signs a cancel"
    ratio = "Theorem 1: |f_2 - y| / |f_1 - y|² falls at least as fast as M^(-1/2)"
    drift = "Lemma: |G - G_0| falls at least as fast as M^(-1/2)"
    return [
        claim("constant", ratio, "that ratio", rule=fast),
        claim("drift_G", drift, "|G - G_0| at the end", rule=fast),
        claim("drift_J", "Lemma: |J - J_0| falls as M^(-1/2)", "|J - J_0| at the end", low=-0.6),
        claim("kernel_gap", "Lemma: |G_0 - K| falls as M^(-1/2)", "|G_0 - K|", low=-0.6),
    ]


def relative_rate(runs: pd.DataFrame, predicted: pd.Series) -> pd.Series:
    """Return (1 - c) / (1 - rho) - 1 for each run's contraction c; NaN if either is missing or rho is not below 1."""
    return (1 - runs.c) / (1 - predicted.where(predicted < 1)) - 1


def _contractions(runs: pd.DataFrame) -> list[Claim]:
    widest = f", {runs.M.max():,}" if len(runs) else ""
    against_rho, against_A, random = [], [], []
    # The widest first: the rules are about it.
    for _, at in runs.assign(narrow=-runs.M).groupby(["narrow", "b"]):
        name = f"M = {at.M.iloc[0]}, b = {at.b.iloc[0]}"
        cyclic, shuffled = at[at.order == "cyclic"], at[at.order == "shuffle"]
        if cyclic.rho.notna().any():
            name_rho = f"{name} (median ρ {median(cyclic.rho.dropna()):.3f})"
            of_rho = values_by(cyclic, relative_rate(cyclic, cyclic.rho))
            against_rho.append(Measurement(f"(1 - c) / (1 - ρ) - 1, {name_rho}", of_rho))
            of_A = values_by(cyclic, relative_rate(cyclic, cyclic.c_A))
            against_A.append(Measurement(f"(1 - c) / (1 - c_A) - 1, {name}", of_A))
        if len(shuffled):
            known = cyclic.c.dropna()
            name += f"; in cyclic order {median(known):.3f}" if len(known) else ""
            numbers = values_by(shuffled, shuffled.c)
            random.append(Measurement(f"contraction per epoch in random order, {name}", numbers))
    return [
        _judged(
            "contraction",
            "Theorem 2: with fixed mini-batches in a fixed order |f - y| falls by ρ(A) per epoch",
            "T3",
            f"|(1 - c) / (1 - ρ) - 1| is at most 5 % in the median over seeds at the largest width{widest}; c is "
            "the geometric mean over the second half of the epochs",
            against_rho,
            lambda value: abs(value) <= 0.05,
        ),
        _judged(
            "contraction_A",
            "The network follows the linear iteration r <- A r over the same epochs",
            "T3",
            "|(1 - c) / (1 - c_A) - 1| is at most 1 % at the largest width; c_A is the contraction of A^t r_0",
            against_A,
            lambda value: abs(value) <= 0.01,
        ),
        _judged(
            "shuffle",
            "Not in the paper: random order converges linearly as well",
            "T3",
            "the contraction is below 1",
            random,
            lambda value: value < 1,
        ),
    ]


def _methods(runs: pd.DataFrame) -> list[Claim]:
    def remaining(runs: pd.DataFrame, after: int) -> dict[str, float]:
        known = runs[runs.epoch.map(lambda epochs: after in epochs).astype(bool)]
        pairs = zip(known.epoch, known.residual, strict=True)
        shares = [residuals[epochs.index(after)] / residuals[0] for epochs, residuals in pairs]
        return values_by(known, pd.Series(shares, index=known.index, dtype=float))

    is_plain = (runs.lam == 1) & (runs.alpha == 0)
    descent, ggn = runs[runs.method == "gradient_descent"], runs[is_plain & (runs.method == "ggn")]
    relaxed = runs[~is_plain & (runs.method == "ggn")]
    last = int(descent.epochs.max()) if len(descent) else 0
    left = "|f - y| / |f_0 - y| after"
    over = "contraction of gradient descent per step over that predicted, at its best learning rate"
    compared = [
        Measurement(over, values_by(descent, descent.c / descent.c_A)),
        Measurement("that contraction", values_by(descent, descent.c)),
        Measurement(f"{left} {last} steps of gradient descent", remaining(descent, last)),
        Measurement(f"{left} 4 steps of GGN", remaining(ggn, 4)),
    ]
    measured = [
        Measurement(
            f"contraction per step with λ = {lam:g}, α = {alpha:g}, over that predicted "
            f"(ρ {median(own.rho.fillna(0.0)):.3f})",
            values_by(own, own.c / own.c_A),
        )
        for (lam, alpha), own in relaxed.groupby(["lam", "alpha"])
    ]
    text = "Gradient descent converges linearly, GGN quadratically"
    away = "Away from λ = 1, α = 0 GGN converges linearly"

    def holds(value: float) -> bool:
        return abs(value - 1) <= 0.05

    return [
        _judged("descent", text, "T4", "the first number is within 5 % of 1", compared, holds),
        _judged("relaxed", away, "T4", "each is within 5 % of 1", measured, holds, every=True),
    ]


def _costs(costs: pd.DataFrame) -> list[Claim]:
    parts = {
        "(A), forward and per-sample backward": "part_A_s",
        "(B), Gram product and solve": "part_B_s",
        "the Gram product": "gram_s",
        "the solve": "solve_s",
    }
    exponents = [
        Measurement(f"exponent of {axis} in the time of {name}", slopes(rows, part, axis, "round"), "round")
        for rows, axis in zip(cost_axes(costs), ("b", "m"), strict=True)
        for name, part in parts.items()
        if not (axis == "m" and name == "the solve")
    ]
    # The largest images first: the rules are about them, and in the whole study they are the paper's.
    shapes = [own for _, own in costs.groupby(["pixels", "b", "network", "m"])]
    shapes.sort(key=lambda own: -own.pixels.iloc[0])
    shares, ratios, at = [], [], "the first shape"
    if shapes and (shapes[0].pixels.iloc[0], shapes[0].b.iloc[0]) == PAPERS_SHAPE:
        at = "the paper's shape, the first"
    for own in shapes:
        first = own.iloc[0]
        name = f"{first.network}, {first.pixels}x{first.pixels}, b = {first.b}, m = {first.m:,}"
        share, ratio = own.part_B_s / own.step_s, own.part_A_s / own.sgd_s
        shares.append(
            Measurement(f"part (B) over the whole step, {name}", values_by(own, share, "round"), "round")
        )
        ratios.append(
            Measurement(f"part (A) over a step of SGD, {name}", values_by(own, ratio, "round"), "round")
        )
    return [
        _judged(
            "cost_A",
            "Part (A) of a step, forward and per-sample backward, is of the order of SGD's step",
            "T5",
            f"at most twice SGD's step at {at}",
            ratios,
            lambda value: value <= 2,
        ),
        _judged(
            "cost_B",
            "Part (B), b²m + b³, is small for ordinary b",
            "T5",
            f"at most a tenth of the step at {at}",
            shares,
            lambda value: value <= 0.1,
        ),
        _judged(
            "exponents",
            "The time of (A) grows as b, that of the Gram product as b² m, that of the solve as b³",
            "T5",
            "the first number, of (A) in b, is from 0.8 to 1.2; fixed costs of small products lower the others",
            exponents,
            lambda value: 0.8 <= value <= 1.2,
        ),
    ]


def _judged(
    key: str,
    text: str,
    figure: str,
    rule: str,
    measurements: Sequence[Measurement],
    holds: Callable[[float], bool],
    *,
    every: bool = False,
) -> Claim:
    """Return a statement with its verdict: whether the medians of the first number, or of all, fulfil the rule."""
    measured = tuple(each for each in measurements if each.values)
    if not measured:
        return Claim(key, text, figure, rule, (), "not measured", "run make theory")
    decisive = measured if every else measured[:1]
    seen = all(holds(each.median) for each in decisive)
    return Claim(key, text, figure, rule, measured, "yes" if seen else "no")
