"""What the theory's figures are drawn with: bands, sizes with bars, axes, guides, titles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from gramgn.errors import counted
from gramgn.figures.style import LineStyle, as_words
from gramgn.figures.theory.records import TheoryRun

WIDTH, HEIGHT = 6.9, 3.1
GUIDE: dict[str, Any] = {"color": "#777777", "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 1.5}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2), (7, 2))


def title_of(number: str, what: str, runs: Sequence[TheoryRun]) -> str:
    """Return one line: number, what is shown, data and whether they are synthetic, sizes, seeds."""
    first = runs[0].setting
    kind = "SYNTHETIC " if first.kind == "synthetic" else ""
    seeds = counted(len({run.setting.seed for run in runs}), "seed")
    shape = f"n = {first.n}, d = {first.d}, {as_words(first.activation)}, float64"
    return f"{number}  {what}; {kind}{as_words(first.dataset)}, {shape}; {seeds}"


def two_panels(number: str, what: str, runs: Sequence[TheoryRun]) -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure of two panels with its title."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    figure.suptitle(title_of(number, what, runs), fontsize=8)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def band(
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


def sizes_with_bars(
    axes: Axes,
    points: Mapping[float, Sequence[float]],
    color: str,
    marker: str,
    label: str,
    dashes: tuple[float, ...] = (),
) -> None:
    """Draw medians against a size with bars from the least to the greatest."""
    if not points:
        return
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


def guide_half(axes: Axes, widths: Sequence[float]) -> None:
    """Draw M^(-1/2) through the largest value at the least width."""
    top = axes.dataLim.ymax
    if not math.isfinite(top):
        return  # nothing is drawn
    values = [top * (M / widths[0]) ** -0.5 for M in widths]
    axes.plot(widths, values, **GUIDE, label="$M^{-1/2}$")


def iterations(axes: Axes, *, whole: bool = True) -> None:
    """Set up the axes of a panel of residuals against iterations."""
    axes.set(xlabel="iteration", ylabel="$|f - y|$", xlim=(0, None))
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-16))
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def log_sizes(axes: Axes, sizes: Sequence[float], *, thousands: bool = False) -> None:
    """Set up a logarithmic axis with a tick at each size."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:.0f}k" if thousands else f"{value:,.0f}")
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=6.5, rotation=45 if len(sizes) > 5 and not thousands else 0)


def legend(
    axes: Axes,
    *,
    title: str | None = None,
    loc: Literal["best", "upper left", "upper center", "lower left", "lower right"] = "best",
    columns: int = 1,
) -> None:
    """Add a legend in the size of these figures, on white, so that no guide strikes its words through."""
    if not axes.get_legend_handles_labels()[0]:
        return
    box = axes.legend(
        fontsize=6.5,
        title=title,
        title_fontsize=6.5,
        loc=loc,
        ncols=columns,
        handlelength=2.6,
        labelspacing=0.3,
        columnspacing=1.2,
        frameon=True,
        framealpha=0.85,
        edgecolor="none",
        borderpad=0.2,
    )
    box.get_frame().set_linewidth(0)


def shades(count: int) -> list[str]:
    """Return colours from dark to light, in order also in grey, none too light for a line."""
    colors = matplotlib.colormaps["viridis"]
    places = [0.85 * place / max(1, count - 1) for place in range(count)]
    return [matplotlib.colors.to_hex(colors(place)) for place in places]
