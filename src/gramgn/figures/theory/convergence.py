"""Drawing convergence: quadratic, against the width, with mini-batches, beside other methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gramgn.figures.style import PALETTE
from gramgn.figures.theory.judge import slopes
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
    shades,
    sizes_with_bars,
    title_of,
    two_panels,
)
from gramgn.figures.theory.records import Setting, TheoryRun
from gramgn.figures.theory.statements import relative_rate
from gramgn.theory.rates import FLOOR

_FARTHEST = 50  # |log| of a predicted residual that is still drawn


def draw_quadratic(runs: Sequence[TheoryRun]) -> Figure:
    """Draw T1: residuals against iterations for each M, and the order of convergence against M."""
    figure, (left, right) = two_panels("T1", "Theorem 1: quadratic convergence", runs)
    widths = sorted({run.setting.M for run in runs})
    for color, marker, M in zip(shades(len(widths)), cycle(MARKERS), widths, strict=False):
        own = [run for run in runs if run.setting.M == M]
        band(left, own, color=color, marker=marker, label=f"M = {M:,}")
    left.axhline(FLOOR, **GUIDE)
    left.annotate("rounding below", (0, FLOOR), (3, 2), textcoords="offset points", size=6, color="#777777")
    iterations(left)
    legend(left, title="band: least to greatest")
    for run in runs:
        if run.order_of_convergence is not None:
            right.plot(
                run.setting.M, run.order_of_convergence, "o", color=PALETTE[0], markersize=2.5, alpha=0.5
            )
    medians = {
        M: statistics.median(orders)
        for M in widths
        if (
            orders := [
                run.order_of_convergence
                for run in runs
                if run.setting.M == M and run.order_of_convergence is not None
            ]
        )
    }
    right.plot(list(medians), list(medians.values()), "-", color=PALETTE[0], label="median; points: seeds")
    right.axhline(2, **GUIDE, label="quadratic: 2")
    log_sizes(right, list(medians) or widths)
    right.set(xlabel="width M", ylabel="order of convergence, last step")
    low, high = right.get_ylim()
    right.set_ylim(min(low, 1.5), max(high, 2.5))
    legend(right)
    return figure


def draw_widths(runs: Sequence[TheoryRun]) -> Figure:
    """Draw T2: the constant of Theorem 1, the drifts, and the distance from the limit kernel against M."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    panels = figure.subplots(1, 3)
    title = title_of("T2", "what falls with the width", runs)
    figure.suptitle(f"{title}; bars: least to greatest", fontsize=7.5)
    widths = sorted({run.setting.M for run in runs})
    lines: tuple[tuple[Axes, str, str, Callable[[TheoryRun], float | None]], ...] = (
        (panels[0], PALETTE[1], "$|f_2 - y| / |f_1 - y|^2$", lambda run: run.constant),
        (panels[1], PALETTE[0], "$|G - G_0|$", lambda run: run.epochs[-1].drift_G),
        (panels[1], PALETTE[2], "$|J - J_0|$", lambda run: run.epochs[-1].drift_J),
        (panels[2], PALETTE[4], "$|G_0 - K|$", lambda run: run.setting.kernel_gap),
    )
    for place, (axes, color, name, value) in enumerate(lines):
        points = {
            float(M): numbers
            for M in widths
            if (numbers := [number for run in runs if run.setting.M == M and (number := value(run))])
        }
        fitted = slopes(runs, value, lambda run: run.setting.M)
        label = f"{name}, slope {statistics.median(fitted.values()):.2f}" if fitted else name
        sizes_with_bars(axes, points, color, MARKERS[place], label)
    for axes in panels:
        guide_half(axes, widths)
        log_sizes(axes, widths)
        axes.set_yscale("log")
        axes.set_xlabel("width M")
        _room_below(axes)
        legend(axes, loc="lower left")
    panels[0].set_title("constant of Theorem 1", fontsize=7.5)
    panels[1].set_title("drift at the end", fontsize=7.5)
    panels[2].set_title("distance from the limit kernel", fontsize=7.5)
    return figure


def _room_below(axes: Axes) -> None:
    """Make room for a legend below the lines of a logarithmic axis that all fall."""
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** (0.09 * len(axes.get_legend_handles_labels()[1])), high)


def draw_cyclic(runs: Sequence[TheoryRun]) -> Figure:
    """Draw T3: residuals for several b beside the predicted rate, and measured over predicted rates."""
    figure, (left, right) = two_panels("T3", "Theorem 2: the Gauss-Seidel rate", runs)
    batches_of: dict[int, set[int]] = {}
    for run in runs:
        if run.setting.order == "cyclic":
            batches_of.setdefault(run.setting.M, set()).add(run.setting.b)
    shown = max(batches_of, key=lambda M: len(batches_of[M]), default=runs[0].setting.M)
    batches = sorted({run.setting.b for run in runs if shown == run.setting.M})
    of_width = [run for run in runs if shown == run.setting.M]
    for color, marker, b in zip(cycle(PALETTE), cycle(MARKERS), batches, strict=False):
        _draw_batch(left, [run for run in of_width if run.setting.b == b], color, marker)
        _draw_rates(right, [run for run in runs if run.setting.b == b], batches, color, marker)
    left.plot([], [], color="#555555", linewidth=0.8, linestyle=(0, (4, 1.5)), label="random order")
    left.plot([], [], **GUIDE, label="slope of $\\rho(A)^t$, predicted")
    left.set(xlabel="epoch", ylabel="$|f - y| / |f_0 - y|$", xlim=(0, None))
    left.set_yscale("log")
    left.set_ylim(bottom=max(left.get_ylim()[0], 1e-12))
    left.set_title(f"M = {shown:,}; bands: least to greatest", fontsize=7.5)
    legend(left)
    right.axhline(1, **GUIDE)
    log_sizes(right, sorted(batches_of))
    right.set(xlabel="width M", ylabel="$(1 - c) / (1 - \\rho)$")
    right.set_title("measured over predicted rate; bars: least to greatest", fontsize=7.5)
    low, high = right.get_ylim()
    right.set_ylim(low, high + 0.12 * (high - low))  # room for the legend
    legend(right, loc="upper center", columns=4)
    return figure


def _draw_batch(axes: Axes, runs: Sequence[TheoryRun], color: str, marker: str) -> None:
    """Draw the residuals of one b: in cyclic order, with the predicted rate through its middle, and in random."""
    own = [run for run in runs if run.setting.order == "cyclic"]
    if own:
        label = f"b = {own[0].setting.b}, ρ = {_rho(own):.3f}"
        band(axes, own, color=color, marker=marker, label=label, relative=True)
        _draw_prediction(axes, own, color, relative=True)
    if random := [run for run in runs if run.setting.order == "shuffle"]:
        band(axes, random, color=color, marker="", dashes=(4, 1.5), relative=True, width=0.8)


def _draw_rates(
    axes: Axes, runs: Sequence[TheoryRun], batches: Sequence[int], color: str, marker: str
) -> None:
    """Draw (1 - c) / (1 - rho) of one b against M."""
    points: dict[float, list[float]] = {}
    # Side by side where several stand at one width.
    shift = 1.07 ** (batches.index(runs[0].setting.b) - (len(batches) - 1) / 2)
    for run in runs:
        rate = relative_rate(run, run.setting.rho)
        if rate is not None:
            points.setdefault(run.setting.M * shift, []).append(1 + rate)
    if points:
        sizes_with_bars(axes, points, color, marker, f"b = {runs[0].setting.b}")


def _rho(runs: Sequence[TheoryRun]) -> float:
    return statistics.median(run.setting.rho or 0.0 for run in runs)


def _draw_prediction(axes: Axes, runs: Sequence[TheoryRun], color: str, *, relative: bool = False) -> None:
    """Draw rho^t through the median residual at the middle epoch: rho says how steep, not how high."""
    rho = _rho(runs)
    scaled = [run.residuals[len(run.epochs) // 2] / (run.residuals[0] if relative else 1) for run in runs]
    level, middle = statistics.median(scaled), runs[0].epochs[len(runs[0].epochs) // 2].epoch
    if rho > 0 and level > FLOOR:
        # Only where it can be seen: a tiny or huge rho leaves the panel, and then the floats, within a few epochs.
        logs = {t: math.log(level) + (t - middle) * math.log(rho) for t in range(runs[0].setting.epochs + 1)}
        line = {t: math.exp(value) for t, value in logs.items() if abs(value) < _FARTHEST}
        axes.plot(list(line), list(line.values()), **(GUIDE | {"color": color}))


def draw_methods(runs: Sequence[TheoryRun]) -> Figure:
    """Draw T4: gradient descent beside GGN, and GGN by lambda and alpha."""
    figure, (left, right) = two_panels("T4", "other methods", runs)
    plain = [run for run in runs if _damping(run.setting) == (1.0, 0.0)]
    descent = [run for run in runs if run.setting.method == "gradient_descent"]
    if descent:
        label = f"gradient descent, ρ = {_rho(descent):.3f}"
        band(left, descent, color=PALETTE[0], marker="", dashes=(4, 1.5), label=label)
        _draw_prediction(left, descent, PALETTE[0])
        left.plot([], [], **GUIDE, label="slope of $\\rho^t$, predicted")
    if plain:
        band(left, plain, color=PALETTE[1], marker="o", label="GGN, λ = 1, α = 0")
    left.set_xscale("symlog", linthresh=10)
    left.xaxis.set_major_locator(FixedLocator([0, 2, 4, 6, 8, 10, 30, 100, 300, 1000]))
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.xaxis.set_minor_locator(NullLocator())
    iterations(left, whole=False)
    left.set_xlabel("iteration (from 10 on logarithmic)")
    left.set_title("gradient descent at its best rate, and GGN", fontsize=7.5)
    legend(left, loc="lower right")
    dampings = sorted({pair for run in runs if (pair := _damping(run.setting)) is not None})
    for color, marker, (lam, alpha) in zip(cycle(PALETTE), cycle(MARKERS), dampings, strict=False):
        own = [run for run in runs if _damping(run.setting) == (lam, alpha)]
        rate = f"ρ = {_rho(own):.3f}" if _rho(own) > 0 else "quadratic"
        band(right, own, color=color, marker=marker, label=f"λ = {lam:g}, α = {alpha:g}, {rate}")
        _draw_prediction(right, own, color)
    right.plot([], [], **GUIDE, label="slope of $\\rho^t$, predicted from $G_0$")
    if dampings:
        right.axhline(FLOOR, **GUIDE)
    iterations(right)
    right.set_title("GGN by λ and α (beside the sum $JJ^T$)", fontsize=7.5)
    legend(right)
    return figure


def _damping(setting: Setting) -> tuple[float, float] | None:
    return None if setting.lam is None or setting.alpha is None else (setting.lam, setting.alpha)
