"""Drawing the theory: quadratic convergence, its constants against M, the Gauss-Seidel rate, other methods, costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from gramgn.theory.rates import FLOOR, fitted_exponent

from ._style import LineStyle
from ._theory_claims import cost_axes, slopes
from ._theory_table import Cost, Setting, Theory, TheoryRun

_WIDTH, _HEIGHT = 6.9, 3.1
_GUIDE: dict[str, Any] = {"color": "#777777", "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 1.5}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2), (7, 2))
_FOUR = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")


@dataclass(frozen=True)
class TheoryFigure:
    """One figure of the theory.

    Attributes:
        stem: Its file name without ending.
        number: e.g. ``"T1"``.
        title: What it shows.
        alt: The same for readers who cannot see it.
        inputs: The rows that it shows.
        draw: Draws it.
    """

    stem: str
    number: str
    title: str
    alt: str
    inputs: tuple[object, ...]
    draw: Callable[[], Figure]


def theory_figures(theory: Theory) -> list[TheoryFigure]:
    """Return the figures that there are rows for.

    Args:
        theory: The studies' rows.
    """
    quadratic, cyclic, methods = (theory.study(name) for name in ("quadratic", "cyclic", "methods"))
    found = []
    if quadratic:
        found.append(
            TheoryFigure(
                "theory-T1-quadratic",
                "T1",
                "Theorem 1: full-batch GGN converges quadratically",
                "Left: the logarithm of the residual against iterations for several widths M, falling ever faster. "
                "Right: the order of convergence against M, points for the seeds about a line at 2.",
                tuple(quadratic),
                partial(_draw_quadratic, quadratic),
            )
        )
        found.append(
            TheoryFigure(
                "theory-T2-width",
                "T2",
                "What falls with the width M, and how fast",
                "Three panels against M, both axes logarithmic, each with fitted slopes and the line M^(-1/2): the "
                "constant of Theorem 1; the drifts of G and J; the distance of G_0 from the limit kernel K.",
                tuple(quadratic),
                partial(_draw_widths, quadratic),
            )
        )
    if cyclic:
        found.append(
            TheoryFigure(
                "theory-T3-cyclic",
                "T3",
                "Theorem 2: fixed mini-batches contract by the Gauss-Seidel rate",
                "Left: the residual against epochs for several batch sizes, cyclic order beside the prediction rho^t "
                "and random order. Right: the measured rate 1 - c over the predicted 1 - rho for each b and M.",
                tuple(cyclic),
                partial(_draw_cyclic, cyclic),
            )
        )
    if methods:
        found.append(
            TheoryFigure(
                "theory-T4-methods",
                "T4",
                "Gradient descent beside GGN, and λ, α away from (1, 0)",
                "Left: the residual of gradient descent and of GGN against iterations. Right: the residual of GGN "
                "for several lambda and alpha, each beside the rate predicted from G_0.",
                tuple(methods),
                partial(_draw_methods, methods),
            )
        )
    if theory.costs:
        found.append(
            TheoryFigure(
                "theory-T5-cost",
                "T5",
                "What the parts of a step cost",
                "Times of the parts of a step and of SGD, both axes logarithmic, left against b and right against m, "
                "with fitted exponents and the slopes that operation counts give.",
                tuple(theory.costs),
                partial(_draw_costs, theory.costs),
            )
        )
    return found


def _draw_quadratic(runs: Sequence[TheoryRun]) -> Figure:
    figure, (left, right) = _two_panels("T1", "Theorem 1: quadratic convergence", runs)
    widths = sorted({run.setting.M for run in runs})
    for color, marker, M in zip(_shades(len(widths)), _cycle(_MARKERS), widths, strict=False):
        own = [run for run in runs if run.setting.M == M]
        _band(left, own, color=color, marker=marker, label=f"M = {M:,}")
    left.axhline(FLOOR, **_GUIDE)
    left.annotate("rounding below", (0, FLOOR), (0, 2), textcoords="offset points", size=6, color="#777777")
    _iterations(left)
    _legend(left, title="width")
    for run in runs:
        if run.order_of_convergence is not None:
            right.plot(
                run.setting.M, run.order_of_convergence, "o", color="#0072B2", markersize=2.5, alpha=0.5
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
    right.plot(list(medians), list(medians.values()), "-", color="#0072B2", label="median; points: seeds")
    right.axhline(2, **_GUIDE)
    _log_sizes(right, widths)
    right.set(xlabel="width M", ylabel="order of convergence, last step")
    low, high = right.get_ylim()
    right.set_ylim(min(low, 1.5), max(high, 2.5))
    _legend(right)
    return figure


def _draw_widths(runs: Sequence[TheoryRun]) -> Figure:
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    panels = figure.subplots(1, 3)
    figure.suptitle(_title("T2", "what falls with the width", runs), fontsize=8)
    widths = sorted({run.setting.M for run in runs})
    lines: tuple[tuple[Axes, str, str, Callable[[TheoryRun], float]], ...] = (
        (panels[0], "#D55E00", "$|f_2 - y| / |f_1 - y|^2$", lambda run: run.constant),
        (panels[1], "#0072B2", "$|G - G_0|$", lambda run: run.epochs[-1].drift_G),
        (panels[1], "#009E73", "$|J - J_0|$", lambda run: run.epochs[-1].drift_J),
        (panels[2], "#000000", "$|G_0 - K|$", lambda run: run.setting.kernel_gap),
    )
    for place, (axes, color, name, value) in enumerate(lines):
        points = {float(M): [value(run) for run in runs if run.setting.M == M] for M in widths}
        fitted = slopes(runs, value, lambda run: run.setting.M)
        label = f"{name}, slope {statistics.median(fitted.values()):.2f}" if fitted else name
        _sizes(axes, points, color, _MARKERS[place], label)
    for axes in panels:
        _guide_half(axes, widths)
        _log_sizes(axes, widths)
        axes.set_yscale("log")
        axes.set_xlabel("width M")
        _legend(axes)
    panels[0].set_title("constant of Theorem 1", fontsize=7.5)
    panels[1].set_title("drift along the path", fontsize=7.5)
    panels[2].set_title("distance from the limit kernel", fontsize=7.5)
    return figure


def _draw_cyclic(runs: Sequence[TheoryRun]) -> Figure:
    figure, (left, right) = _two_panels("T3", "Theorem 2: the Gauss-Seidel rate", runs)
    cyclic = [run for run in runs if run.setting.order == "cyclic"]
    per_width = {
        M: {run.setting.b for run in cyclic if run.setting.M == M}
        for M in sorted({run.setting.M for run in cyclic})
    }
    shown = max(per_width, key=lambda M: len(per_width[M]))
    batches = sorted(per_width[shown])
    for color, marker, b in zip(_cycle(_FOUR), _cycle(_MARKERS), batches, strict=False):
        own = [run for run in cyclic if (run.setting.M, run.setting.b) == (shown, b)]
        rho = statistics.median(run.setting.rho or 0.0 for run in own)
        _band(left, own, color=color, marker=marker, label=f"b = {b}, ρ = {rho:.3f}", relative=True)
        epochs = [0, own[0].setting.epochs]
        start = statistics.median(_level(run, rho) for run in own)
        left.plot(epochs, [start, start * rho ** epochs[1]], **(_GUIDE | {"color": color}))
        random = [
            run
            for run in runs
            if run.setting.order == "shuffle" and (run.setting.M, run.setting.b) == (shown, b)
        ]
        if random:
            _band(left, random, color=color, marker="", dashes=(4, 1.5), relative=True, width=0.8)
    left.plot([], [], color="#555555", linewidth=0.8, linestyle=(0, (4, 1.5)), label="random order")
    left.plot([], [], **_GUIDE, label="$\\rho(A)^t$, predicted")
    left.set(xlabel="epoch", ylabel="$|f - y| / |f_0 - y|$", xlim=(0, None))
    left.set_yscale("log")
    left.set_ylim(bottom=max(left.get_ylim()[0], 1e-12))
    left.set_title(f"M = {shown:,}", fontsize=7.5)
    _legend(left, columns=1)
    widths = sorted(per_width)
    for color, marker, b in zip(_cycle(_FOUR), _cycle(_MARKERS), batches, strict=False):
        points = {
            M: [
                (1 - run.contraction) / (1 - run.setting.rho)
                for run in cyclic
                if (run.setting.M, run.setting.b) == (M, b)
                and run.contraction is not None
                and run.setting.rho is not None
            ]
            for M in widths
        }
        points = {M: values for M, values in points.items() if values}
        if points:
            # Side by side where several stand at one width.
            shift = 1.07 ** (batches.index(b) - (len(batches) - 1) / 2)
            _sizes(right, {M * shift: values for M, values in points.items()}, color, marker, f"b = {b}")
    right.axhline(1, **_GUIDE)
    _log_sizes(right, widths)
    right.set(xlabel="width M", ylabel="$(1 - c) / (1 - \\rho)$")
    right.set_title("measured rate over predicted rate", fontsize=7.5)
    _legend(right)
    return figure


def _level(run: TheoryRun, rho: float) -> float:
    """Return where rho^t starts if it is to meet the residual, relative to the first, at the middle epoch."""
    middle = run.epochs[len(run.epochs) // 2]
    return middle.residual / run.residuals[0] / rho**middle.epoch if middle.residual > FLOOR else 1.0


def _draw_methods(runs: Sequence[TheoryRun]) -> Figure:
    figure, (left, right) = _two_panels("T4", "other methods", runs)
    plain = [run for run in runs if _damping(run.setting) == (1.0, 0.0)]
    descent = [run for run in runs if run.setting.method == "gd"]
    if descent:
        rho = statistics.median(run.setting.rho or 0.0 for run in descent)
        _band(left, descent, color="#0072B2", marker="", dashes=(4, 1.5), label="gradient descent, best rate")
        start = statistics.median(run.residuals[-1] / rho**run.setting.epochs for run in descent)
        ends = [0, descent[0].setting.epochs]
        left.plot(
            ends,
            [start, start * rho ** ends[1]],
            **(_GUIDE | {"color": "#0072B2"}),
            label=f"predicted, ρ = {rho:.3f}",
        )
    if plain:
        _band(left, plain, color="#D55E00", marker="o", label="GGN, λ = 1, α = 0")
    left.set_xscale("symlog", linthresh=10)
    left.xaxis.set_major_locator(FixedLocator([0, 2, 4, 6, 8, 10, 30, 100, 300, 1000]))
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.xaxis.set_minor_locator(NullLocator())
    _iterations(left, whole=False)
    left.set_title("linear and quadratic", fontsize=7.5)
    _legend(left)
    dampings = sorted({pair for run in runs if (pair := _damping(run.setting)) is not None})
    for color, marker, (lam, alpha) in zip(_cycle(_FOUR), _cycle(_MARKERS), dampings, strict=False):
        own = [run for run in runs if _damping(run.setting) == (lam, alpha)]
        rho = statistics.median(run.setting.rho or 0.0 for run in own)
        label = f"λ = {lam:g}, α = {alpha:g}" + (f", ρ = {rho:.3f}" if rho else ", quadratic")
        _band(right, own, color=color, marker=marker, label=label)
        if rho:
            start = statistics.median(run.residuals[-1] / rho**run.setting.epochs for run in own)
            ends = [0, own[0].setting.epochs]
            right.plot(ends, [start, start * rho ** ends[1]], **(_GUIDE | {"color": color}))
    right.plot([], [], **_GUIDE, label="$\\rho^t$, predicted from $G_0$")
    right.axhline(FLOOR, **_GUIDE)
    _iterations(right)
    right.set_title("GGN by λ and α (beside the sum $JJ^T$)", fontsize=7.5)
    _legend(right)
    return figure


def _draw_costs(costs: Sequence[Cost]) -> Figure:
    over_b, over_m = cost_axes(costs)
    figure = Figure(figsize=(_WIDTH, _HEIGHT + 0.3))
    left, right = figure.subplots(1, 2, sharey=True)
    first = costs[0]
    rounds = max(cost.round for cost in costs)
    figure.suptitle(
        f"T5  cost of the parts of a step, ResNetFixup on noise, {first.pixels}×{first.pixels}; "
        f"medians of {rounds} rounds on {first.device}",
        fontsize=7.5,
    )
    parts: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
        ("(A) forward, backward, J", "#0072B2", lambda cost: cost.part_A_s),
        ("(B) Gram product", "#D55E00", lambda cost: cost.gram_s),
        ("(B) solve, float64", "#009E73", lambda cost: cost.solve_s),
        ("a step of SGD", "#000000", lambda cost: cost.sgd_s),
    )
    of_b: Callable[[Cost], float] = lambda cost: cost.b  # noqa: E731
    of_m: Callable[[Cost], float] = lambda cost: cost.m  # noqa: E731
    axes_of = ((left, over_b, of_b, "b"), (right, over_m, of_m, "m"))
    for axes, rows, size, name in axes_of:
        sizes = sorted({size(cost) for cost in rows})
        for place, (label, color, seconds) in enumerate(parts):
            points = {value: [1e3 * seconds(cost) for cost in rows if size(cost) == value] for value in sizes}
            medians = [statistics.median(points[value]) for value in sizes]
            fitted = (
                f", ~{name}^{fitted_exponent(sizes, medians):.2f}"
                if len(sizes) > 1 and min(medians) > 0
                else ""
            )
            _sizes(axes, points, color, _MARKERS[place], label + fitted, dashes=_DASHES[place])
        _log_sizes(axes, sizes, thousands=name == "m")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _legend(axes)
    left.set(xlabel=f"batch size b ({over_b[0].network}, m = {over_b[0].m:,})", ylabel="time (ms)")
    right.set(xlabel=f"parameters m (b = {over_m[0].b})")
    _count_guides(left, over_b, of_b, {"b": 1, "b²": 2})
    _count_guides(right, over_m, of_m, {"m": 1})
    return figure


def _count_guides(
    axes: Axes, rows: Sequence[Cost], size: Callable[[Cost], float], powers: Mapping[str, int]
) -> None:
    """Draw the slopes that operation counts give, from the middle of the panel."""
    sizes = sorted({size(cost) for cost in rows})
    if len(sizes) < 2:
        return
    low, high = axes.get_ylim()
    top = high
    for name, power in powers.items():
        values = [top * (value / sizes[-1]) ** power for value in sizes]
        axes.plot(sizes, values, **_GUIDE)
        axes.annotate(
            name, (sizes[-1], values[-1]), (3, -4), textcoords="offset points", size=7, color="#777777"
        )
    axes.set_ylim(low, high)


def _damping(setting: Setting) -> tuple[float, float] | None:
    return None if setting.lam is None or setting.alpha is None else (setting.lam, setting.alpha)


def _title(number: str, what: str, runs: Sequence[TheoryRun]) -> str:
    first = runs[0].setting
    kind = "SYNTHETIC " if first.kind == "synthetic" else ""
    seeds = len({run.setting.seed for run in runs})
    shape = f"n = {first.n}, d = {first.d}, {first.activation}, float64"
    return f"{number}  {what}; {kind}{first.dataset}, {shape}; {seeds} seed{'s' if seeds > 1 else ''}"


def _two_panels(number: str, what: str, runs: Sequence[TheoryRun]) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    figure.suptitle(_title(number, what, runs), fontsize=8)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def _band(
    axes: Axes,
    runs: Sequence[TheoryRun],
    *,
    color: str,
    marker: str,
    label: str = "",
    dashes: tuple[float, ...] = (),
    relative: bool = False,
    width: float = 1.3,
) -> None:
    """Draw the median residual over seeds with a band from the least to the greatest."""
    epochs = [each.epoch for each in runs[0].epochs]
    scaled = [[value / run.residuals[0] if relative else value for value in run.residuals] for run in runs]
    columns = list(zip(*scaled, strict=True))
    axes.plot(
        epochs,
        [statistics.median(column) for column in columns],
        color=color,
        linestyle=LineStyle(color, dashes).pattern,
        linewidth=width,
        marker=marker,
        markersize=3,
        label=label or None,
        zorder=3,
    )
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0, zorder=2)


def _sizes(
    axes: Axes,
    points: Mapping[float, Sequence[float]],
    color: str,
    marker: str,
    label: str,
    dashes: tuple[float, ...] = (),
) -> None:
    """Draw medians against a size with bars from the least to the greatest."""
    sizes = sorted(points)
    medians = [statistics.median(points[size]) for size in sizes]
    below = [median - min(points[size]) for size, median in zip(sizes, medians, strict=True)]
    above = [max(points[size]) - median for size, median in zip(sizes, medians, strict=True)]
    axes.errorbar(
        sizes,
        medians,
        yerr=[below, above],
        color=color,
        marker=marker,
        markersize=3.5,
        linewidth=1.2,
        linestyle=LineStyle(color, dashes).pattern,
        elinewidth=0.7,
        capsize=1.5,
        label=label,
    )


def _guide_half(axes: Axes, widths: Sequence[float]) -> None:
    """Draw M^(-1/2) through the largest value at the least width."""
    top = axes.dataLim.ymax
    values = [top * (M / widths[0]) ** -0.5 for M in widths]
    axes.plot(widths, values, **_GUIDE, label="$M^{-1/2}$")


def _iterations(axes: Axes, *, whole: bool = True) -> None:
    axes.set(xlabel="iteration", ylabel="$|f - y|$", xlim=(0, None))
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-16))
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _log_sizes(axes: Axes, sizes: Sequence[float], *, thousands: bool = False) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:.0f}k" if thousands else f"{value:g}")
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=6.5, rotation=45 if len(sizes) > 5 and not thousands else 0)


def _legend(axes: Axes, *, title: str | None = None, columns: int = 1) -> None:
    axes.legend(
        fontsize=6.5, title=title, title_fontsize=6.5, ncols=columns, handlelength=2.6, labelspacing=0.3
    )


def _shades(count: int) -> list[str]:
    """Return colours from dark to light, in order also in grey, none too light for a line."""
    colors = matplotlib.colormaps["viridis"]
    places = [0.85 * place / max(1, count - 1) for place in range(count)]
    return [matplotlib.colors.to_hex(colors(place)) for place in places]


def _cycle(values: Sequence[str]) -> Iterable[str]:
    while True:
        yield from values
