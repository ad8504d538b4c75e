"""Drawing curves: one panel of the paper at the width of a column, and comparisons of any runs.

Call everything that returns a figure inside `house_style`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gramgn.errors import counted
from gramgn.figures.axes import ValueScale, time_unit, value_scale
from gramgn.figures.curves import Comparison, Curve, device_name, seed_points
from gramgn.figures.panels import Panel
from gramgn.figures.style import LineStyle, explain, line_styles

LOSSES = ("train_loss", "test_loss")
ERRORS = ("train_mae", "test_mae")
_WIDTH = 3.4


def draw_panel(panel: Panel, comparison: Comparison) -> Figure:
    """Draw one panel of curves."""
    print_lines = _small_print(comparison, panel)
    columns = 2 if all(len(_legend_text(curve, comparison)) <= 22 for curve in comparison.curves) else 1
    lines = -(-len(comparison.curves) // columns)
    figure = Figure(figsize=(_WIDTH, 2.3 + 0.135 * lines + 0.11 * len(print_lines)))
    figure.suptitle(f"{panel.number}  {comparison.title}", fontsize=7.5)
    fill_panel(figure.subplots(), panel, comparison)
    style: dict[str, Any] = {
        "ncols": columns,
        "fontsize": 7,
        "title_fontsize": 6,
        "handlelength": 3.2,
        "labelspacing": 0.25,
    }
    explain(figure, *legend_of(comparison), "\n".join(print_lines), **style)
    return figure


def fill_panel(axes: Axes, panel: Panel, comparison: Comparison) -> None:
    """Draw the curves and axes of a panel."""
    scale = value_scale(comparison, panel.column)
    unit_s, unit_name = time_unit(comparison)
    seconds = unit_s if panel.against_time else None
    if scale is not None:
        draw_curves(axes, comparison.curves, line_styles(comparison.curves), panel.column, seconds, scale)
        scale.apply([axes])
    else:
        words: dict[str, Any] = {"ha": "center", "va": "center", "size": 7, "transform": axes.transAxes}
        axes.text(0.5, 0.5, "no value above zero", **words)
        axes.set_yticks([])
    axes.set_xlim(left=0)
    axes.set_xlabel(f"training time ({unit_name})" if panel.against_time else "epoch")
    if not panel.against_time:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def draw_comparison(comparison: Comparison, columns: Sequence[str]) -> Figure | None:
    """Draw metrics against training time on the left and against epochs on the right.

    With several seeds a line is their median and the band extends from the least to the greatest; against time, an
    epoch stands at its median time. A diverged run is a thin line that ends in a cross, at its last finite value or
    where it leaves the panel.

    Returns:
        The figure, or None if no column has a value. Call it inside `house_style`.
    """
    scales = {column: value_scale(comparison, column) for column in columns}
    shown = {column: scale for column, scale in scales.items() if scale is not None}
    if not shown:
        return None
    legend_lines = math.ceil(len(comparison.curves) / _legend_columns(comparison)) + 2
    figure = Figure(figsize=(6.9, 0.6 + 2.3 * len(shown) + 0.17 * legend_lines))
    panels = figure.subplots(len(shown), 2, squeeze=False, sharey="row", sharex="col")
    styles = line_styles(comparison.curves)
    unit_s, unit_name = time_unit(comparison)
    for row, (column, scale) in zip(panels, shown.items(), strict=True):
        for axes, seconds in zip(row, (unit_s, None), strict=True):
            draw_curves(axes, comparison.curves, styles, column, seconds, scale)
        scale.apply(list(row))
    for axes, name in zip(panels[-1], (f"training time ({unit_name})", "epoch"), strict=True):
        axes.set_xlabel(name)
        axes.set_xlim(left=0)
    panels[-1][1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    _add_texts(figure, comparison, list(shown))
    return figure


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    styles: Sequence[LineStyle],
    column: str,
    unit_s: float | None,
    scale: ValueScale,
) -> None:
    """Draw one metric into a panel.

    Against time if `unit_s` is the number of seconds in the unit of the axis, else against epochs. A line that leaves
    the vertical axis upwards gets its cross on the upper end; if it comes back, a triangle marks what is above. A
    value of zero, for which a logarithmic axis has no place, is marked on the lower end.
    """
    for curve, style in zip(curves, styles, strict=True):
        _draw_finished(axes, curve, style, column, unit_s, scale)
        for rows in curve.diverged:
            _draw_diverged(axes, seed_points(rows, column), style, unit_s, scale)


def _draw_finished(
    axes: Axes, curve: Curve, style: LineStyle, column: str, unit_s: float | None, scale: ValueScale
) -> None:
    points = curve.points(column)
    if points.empty:
        return
    x, values = _positions(points, unit_s), points["median"].to_numpy()
    _mark_end(axes, x[values > scale.high], scale.high, "^", style)
    _mark_end(axes, x[values <= 0], scale.low, "v", style)
    (line,) = axes.plot(x, values, color=style.color, linestyle=style.pattern, zorder=3)
    if len(points) == 1 or style.marked:
        line.set(marker="o", markersize=3.2, markevery=max(1, len(points) // 7), markeredgewidth=0.9)
        line.set_markerfacecolor("white" if style.marked else style.color)
    if curve.num_finished > 1:
        axes.fill_between(
            x,
            points.low.clip(lower=scale.low),
            points.high,
            color=style.color,
            alpha=0.18,
            linewidth=0,
            zorder=2,
        )


def _mark_end(axes: Axes, x: np.ndarray, end: float, marker: str, style: LineStyle) -> None:
    """Mark values that the vertical axis does not reach on its end."""
    if len(x):
        looks: dict[str, Any] = {"linestyle": "none", "marker": marker, "markersize": 4, "clip_on": False}
        axes.plot(x, np.full(len(x), end), color=style.color, **looks)


def _draw_diverged(
    axes: Axes, points: pd.DataFrame, style: LineStyle, unit_s: float | None, scale: ValueScale
) -> None:
    if points.empty:
        return
    x, values = _positions(points, unit_s), points["median"].to_numpy()
    axes.plot(x, values, color=style.color, linestyle=style.pattern, linewidth=0.9, zorder=3)
    _mark_end(axes, x[values <= 0], scale.low, "v", style)
    known = ~np.isnan(values)
    end = _end_inside(x[known], values[known], scale.high)
    cross: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.5, "clip_on": False}
    axes.plot([end[0]], [end[1]], color=style.color, zorder=4, **cross)


def _end_inside(x: np.ndarray, values: np.ndarray, high: float) -> tuple[float, float]:
    """Return the last point of a line, or where it crosses `high` for good, on a logarithmic axis."""
    inside = np.flatnonzero(values <= high)
    last = int(inside[-1]) if len(inside) else -1
    if last == len(values) - 1:
        return x[-1], values[-1]
    if last < 0 or values[last] <= 0:
        return x[last + 1], high
    share = math.log(high / values[last]) / math.log(values[last + 1] / values[last])
    return x[last] + share * (x[last + 1] - x[last]), high


def _positions(points: pd.DataFrame, unit_s: float | None) -> np.ndarray:
    x = points.index if unit_s is None else points.train_s / unit_s
    return x.to_numpy(dtype=float)


def legend_handle(curve: Curve, style: LineStyle) -> Line2D:
    """Return what represents a curve in a legend."""
    handle = Line2D([], [], color=style.color, linestyle=style.pattern)
    if not curve.num_finished:
        handle.set(linewidth=0.9, marker="x", markersize=6)
    elif style.marked:
        handle.set(marker="o", markersize=3.2, markerfacecolor="white", markeredgewidth=0.9)
    return handle


def legend_of(comparison: Comparison) -> tuple[list[Line2D], list[str]]:
    """Return handles and texts of the legend of a panel."""
    styles = line_styles(comparison.curves)
    handles = [legend_handle(curve, style) for curve, style in zip(comparison.curves, styles, strict=True)]
    return handles, [_legend_text(curve, comparison) for curve in comparison.curves]


def seeds_of(curves: Sequence[Curve]) -> str:
    """Return the number of seeds of curves, e.g. `"3 seeds"` or `"1 to 3 seeds"`."""
    counts = {curve.num_seeds for curve in curves}
    low, high = min(counts), max(counts)
    return f"{low} to {high} seeds" if low < high else counted(high, "seed")


def _legend_text(curve: Curve, comparison: Comparison) -> str:
    """Return the label; the number of seeds only where curves differ in it, as the small print has it too."""
    notes = []
    if len({each.num_seeds for each in comparison.curves}) > 1:
        notes.append(counted(curve.num_seeds, "seed"))
    if curve.num_diverged:
        of = "" if notes else f" of {curve.num_seeds}"
        notes.append(f"{curve.num_diverged}{of} diverged")
    return curve.label + (f" ({', '.join(notes)})" if notes else "")


def _small_print(comparison: Comparison, panel: Panel) -> list[str]:
    notes = [seeds_of(comparison.curves)]
    if any(curve.num_finished > 1 for curve in comparison.curves):
        notes.append("line: median, band: least to greatest")
    notes += _marks(comparison, [panel.column])
    rows = comparison.rows
    threads = rows.threads[rows.device_kind == "cpu"].dropna().unique()
    device = device_name(comparison.rows) + "".join(f", {counted(int(count), 'thread')}" for count in threads)
    return ["; ".join(notes), f"time: training only, on {device}" if panel.against_time else f"on {device}"]


def _marks(comparison: Comparison, columns: Sequence[str]) -> list[str]:
    """Return what the signs on the lines mean, for those that occur."""
    notes = ["×: diverged"] if any(curve.num_diverged for curve in comparison.curves) else []
    scales = {column: value_scale(comparison, column) for column in columns}
    shown = [
        (column, scale, curve)
        for column, scale in scales.items()
        if scale is not None
        for curve in comparison.curves
    ]
    if any((curve.points(column)["median"] > scale.high).any() for column, scale, curve in shown):
        notes.append("▲: above the axis")
    lines = [
        points["median"]
        for column, _, curve in shown
        for points in (curve.points(column), *(seed_points(rows, column) for rows in curve.diverged))
    ]
    below = "▼: zero or less" if any((values < 0).any() for values in lines) else "▼: zero"
    return [*notes, below] if any((values <= 0).any() for values in lines) else notes


def _add_texts(figure: Figure, comparison: Comparison, columns: Sequence[str]) -> None:
    figure.suptitle(comparison.title, fontsize=9)
    notes = [] if any(curve.num_seeds > 1 for curve in comparison.curves) else ["1 seed"]
    if any(curve.num_finished > 1 for curve in comparison.curves):
        notes.append("line: median over seeds; band: least to greatest")
    notes += _marks(comparison, columns)
    if comparison.num_hidden:
        total = len(comparison.curves) + comparison.num_hidden
        notes.append(f"the {len(comparison.curves)} curves of {total} that end with the least training loss")
    time = f"time: training only, on {device_name(comparison.rows)}"
    labels = [curve.legend for curve in comparison.curves]
    title = "\n".join([time, *(["; ".join(notes)] if notes else [])])
    style: dict[str, Any] = {"ncols": _legend_columns(comparison), "title_fontsize": 7, "handlelength": 3.2}
    explain(figure, legend_of(comparison)[0], labels, title, **style)


def _legend_columns(comparison: Comparison) -> int:
    return 2 if all(len(curve.legend) <= 45 for curve in comparison.curves) else 1
