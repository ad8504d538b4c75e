"""Drawing convergence: quadratic, against the width, with mini-batches, next to other methods."""

from __future__ import annotations

import math
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gramgn.figures.style import PALETTE
from gramgn.figures.theory.parts import (
    GUIDE,
    HEIGHT,
    MARKERS,
    WIDTH,
    band,
    guide_half,
    iterations,
    legend,
    log_sizes,
    residuals_of,
    shades,
    sizes_with_bars,
    title_of,
    two_panels,
)
from gramgn.figures.theory.statements import relative_rate
from gramgn.figures.theory.table import median, slopes
from gramgn.theory.rates import FLOOR

_FARTHEST = 50  # |log| of a predicted residual that is still drawn


def draw_quadratic(runs: pd.DataFrame) -> Figure:
    """Draw T1: residuals against iterations for each M, and the order of convergence against M."""
    figure, (left, right) = two_panels("T1", "Theorem 1: quadratic convergence", runs)
    widths = sorted(runs.M.unique())
    for color, marker, (M, own) in zip(shades(len(widths)), cycle(MARKERS), runs.groupby("M"), strict=False):
        band(left, own, color=color, marker=marker, label=f"M = {M:,}")
    left.axhline(FLOOR, **GUIDE)
    left.annotate("rounding below", (0, FLOOR), (3, 2), textcoords="offset points", size=6, color="#777777")
    iterations(left)
    legend(left, title="band: least to greatest")
    known = runs[runs.convergence_order.notna()]
    for M, order in zip(known.M, known.convergence_order, strict=True):
        right.plot(M, order, "o", color=PALETTE[0], markersize=2.5, alpha=0.5)
    medians = known.groupby("M").convergence_order.median()
    right.plot(medians.index, medians, "-", color=PALETTE[0], label="median; points: seeds")
    right.axhline(2, **GUIDE, label="quadratic: 2")
    log_sizes(right, list(medians.index) or widths)
    right.set(xlabel="width M", ylabel="order of convergence, last step")
    low, high = right.get_ylim()
    right.set_ylim(min(low, 1.5), max(high, 2.5))
    legend(right)
    return figure


def draw_widths(runs: pd.DataFrame) -> Figure:
    """Draw T2: the constant of Theorem 1, the drifts, and the distance from the limit kernel against M."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    panels = figure.subplots(1, 3)
    title = title_of("T2", "what falls with the width", runs)
    figure.suptitle(f"{title}; bars: least to greatest", fontsize=7.5)
    widths = sorted(runs.M.unique())
    lines = (
        (panels[0], PALETTE[1], "$|f_2 - y| / |f_1 - y|^2$", "constant"),
        (panels[1], PALETTE[0], "$|G - G_0|$", "drift_G"),
        (panels[1], PALETTE[2], "$|J - J_0|$", "drift_J"),
        (panels[2], PALETTE[4], "$|G_0 - K|$", "kernel_gap"),
    )
    for marker, (axes, color, name, column) in zip(MARKERS, lines, strict=False):
        fitted = slopes(runs, column, "M")
        label = f"{name}, slope {median([*fitted.values()]):.2f}" if fitted else name
        sizes_with_bars(axes, runs.M, runs[column].where(runs[column] != 0), color, marker, label)
    for axes in panels:
        guide_half(axes, widths)
        log_sizes(axes, widths)
        axes.set_yscale("log")
        axes.set_xlabel("width M")
        # Room for a legend below lines that all fall.
        low, high = axes.get_ylim()
        axes.set_ylim(low * (low / high) ** (0.09 * len(axes.get_legend_handles_labels()[1])), high)
        legend(axes, loc="lower left")
    panels[0].set_title("constant of Theorem 1", fontsize=7.5)
    panels[1].set_title("drift at the end", fontsize=7.5)
    panels[2].set_title("distance from the limit kernel", fontsize=7.5)
    return figure


def draw_cyclic(runs: pd.DataFrame) -> Figure:
    """Draw T3: residuals for several b next to the predicted rate, and measured over predicted rates."""
    figure, (left, right) = two_panels("T3", "Theorem 2: the Gauss-Seidel rate", runs)
    cyclic = runs[runs.order == "cyclic"]
    shown = cyclic.groupby("M", sort=False).b.nunique().idxmax() if len(cyclic) else runs.M.iloc[0]
    batches = sorted(runs.b[shown == runs.M].unique())
    for place, b in enumerate(batches):
        color, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        own = runs[runs.b == b]
        _draw_batch(left, own[shown == own.M], color, marker)
        # Side by side where several stand at one width.
        shift = 1.07 ** (place - (len(batches) - 1) / 2)
        rates = 1 + relative_rate(own, own.rho)
        sizes_with_bars(right, own.M * shift, rates, color, marker, f"b = {b}")
    left.plot([], [], color="#555555", linewidth=0.8, linestyle=(0, (4, 1.5)), label="random order")
    left.plot([], [], **GUIDE, label="slope of $\\rho(A)^t$, predicted")
    left.set(xlabel="epoch", ylabel="$|f - y| / |f_0 - y|$", xlim=(0, None))
    left.set_yscale("log")
    left.set_ylim(bottom=max(left.get_ylim()[0], 1e-12))
    left.set_title(f"M = {shown:,}; bands: least to greatest", fontsize=7.5)
    legend(left)
    right.axhline(1, **GUIDE)
    log_sizes(right, sorted(cyclic.M.unique()))
    right.set(xlabel="width M", ylabel="$(1 - c) / (1 - \\rho)$")
    right.set_title("measured over predicted rate; bars: least to greatest", fontsize=7.5)
    low, high = right.get_ylim()
    right.set_ylim(low, high + 0.12 * (high - low))  # room for the legend
    legend(right, loc="upper center", columns=4)
    return figure


def _draw_batch(axes: Axes, runs: pd.DataFrame, color: str, marker: str) -> None:
    """Draw the residuals of one b: in cyclic order, with the predicted rate through its middle, and in random."""
    cyclic, random = runs[runs.order == "cyclic"], runs[runs.order == "shuffle"]
    if len(cyclic):
        label = f"b = {cyclic.b.iloc[0]}, ρ = {_rho(cyclic):.3f}"
        band(axes, cyclic, color=color, marker=marker, label=label, relative=True)
        _draw_prediction(axes, cyclic, color, relative=True)
    if len(random):
        band(axes, random, color=color, marker="", dashes=(4, 1.5), relative=True, width=0.8)


def _rho(runs: pd.DataFrame) -> float:
    return median(runs.rho.fillna(0.0))


def _draw_prediction(axes: Axes, runs: pd.DataFrame, color: str, *, relative: bool = False) -> None:
    """Draw rho^t through the median residual at the middle epoch: rho says how steep, not how high."""
    rho, epochs = _rho(runs), runs.epoch.iloc[0]
    half = len(epochs) // 2
    level = float(np.median(residuals_of(runs, relative=relative)[:, half]))
    if rho > 0 and level > FLOOR:
        # Only where it can be seen: a tiny or huge rho leaves the panel, and then the floats, within a few epochs.
        t = np.arange(runs.epochs.iloc[0] + 1)
        logs = math.log(level) + (t - epochs[half]) * math.log(rho)
        seen = np.abs(logs) < _FARTHEST
        axes.plot(t[seen], np.exp(logs[seen]), **(GUIDE | {"color": color}))


def draw_methods(runs: pd.DataFrame) -> Figure:
    """Draw T4: gradient descent next to GGN, and GGN by lambda and alpha."""
    figure, (left, right) = two_panels("T4", "other methods", runs)
    plain = runs[(runs.lam == 1) & (runs.alpha == 0)]
    descent = runs[runs.method == "gradient_descent"]
    if len(descent):
        label = f"gradient descent, ρ = {_rho(descent):.3f}"
        band(left, descent, color=PALETTE[0], marker="", dashes=(4, 1.5), label=label)
        _draw_prediction(left, descent, PALETTE[0])
        left.plot([], [], **GUIDE, label="slope of $\\rho^t$, predicted")
    if len(plain):
        band(left, plain, color=PALETTE[1], marker="o", label="GGN, λ = 1, α = 0")
    left.set_xscale("symlog", linthresh=10)
    left.xaxis.set_major_locator(FixedLocator([0, 2, 4, 6, 8, 10, 30, 100, 300, 1000]))
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.xaxis.set_minor_locator(NullLocator())
    iterations(left, whole=False)
    left.set_xlabel("iteration (from 10 on logarithmic)")
    left.set_title("gradient descent at its best rate, and GGN", fontsize=7.5)
    legend(left, loc="lower right")
    dampings = runs.groupby(["lam", "alpha"])
    for color, marker, ((lam, alpha), own) in zip(cycle(PALETTE), cycle(MARKERS), dampings, strict=False):
        rate = f"ρ = {_rho(own):.3f}" if _rho(own) > 0 else "quadratic"
        band(right, own, color=color, marker=marker, label=f"λ = {lam:g}, α = {alpha:g}, {rate}")
        _draw_prediction(right, own, color)
    right.plot([], [], **GUIDE, label="slope of $\\rho^t$, predicted from $G_0$")
    if len(dampings):
        right.axhline(FLOOR, **GUIDE)
    iterations(right)
    right.set_title("GGN by λ and α (added to the sum $JJ^T$)", fontsize=7.5)
    legend(right)
    return figure
