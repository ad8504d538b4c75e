"""Elements of the theory's figures: bands, sizes with bars, axes, guides, titles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from gramgn.errors import counted
from gramgn.figures.style import LineStyle, as_words

WIDTH, HEIGHT = 6.9, 3.1
GUIDE: dict[str, Any] = {"color": "#777777", "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 1.5}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2), (7, 2))


def title_of(number: str, what: str, runs: pd.DataFrame) -> str:
    """Return one line: number, what is shown, data and whether they are synthetic, sizes, seeds."""
    first = runs.iloc[0]
    kind = "SYNTHETIC " if first.kind == "synthetic" else ""
    shape = f"n = {first.n}, d = {first.d}, {as_words(first.activation)}, float64"
    seeds = counted(runs.seed.nunique(), "seed")
    return f"{number}  {what}; {kind}{as_words(first.dataset)}, {shape}; {seeds}"


def two_panels(number: str, what: str, runs: pd.DataFrame) -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure of two panels with its title."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    figure.suptitle(title_of(number, what, runs), fontsize=8)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def residuals_of(runs: pd.DataFrame, *, relative: bool = False) -> np.ndarray:
    """Return |f - y| of runs that were measured at the same epochs, [runs, epochs], or its ratio to the first."""
    residuals = np.array(runs.residual.tolist())
    return residuals / residuals[:, :1] if relative else residuals


def band(
    axes: Axes,
    runs: pd.DataFrame,
    *,
    color: str,
    marker: str,
    label: str = "",
    dashes: tuple[float, ...] = (),
    relative: bool = False,
    width: float = 1.3,
) -> None:
    """Draw the median residual over seeds with a band from the least to the greatest."""
    epochs, residuals = runs.epoch.iloc[0], residuals_of(runs, relative=relative)
    axes.plot(
        epochs,
        np.median(residuals, axis=0),
        color=color,
        linestyle=LineStyle(color, dashes).pattern,
        linewidth=width,
        marker=marker,
        markersize=3,
        label=label or None,
        zorder=3,
    )
    low, high = residuals.min(axis=0), residuals.max(axis=0)
    axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0, zorder=2)


def sizes_with_bars(
    axes: Axes,
    sizes: pd.Series,
    values: pd.Series,
    color: str,
    marker: str,
    label: str,
    dashes: tuple[float, ...] = (),
) -> None:
    """Draw medians against a size with bars from the least to the greatest; missing values take no part."""
    points = values.dropna().groupby(sizes).agg(["median", "min", "max"])
    if points.empty:
        return
    axes.errorbar(
        points.index,
        points["median"],
        yerr=[points["median"] - points["min"], points["max"] - points["median"]],
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
