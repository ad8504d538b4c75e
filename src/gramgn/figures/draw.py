"""Drawing one comparison: quantities in rows, against time on the left and against epochs on the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ._axes import time_unit, value_scale
from ._group import Comparison, Curve, Point, seed_points
from ._style import LineStyle, line_styles

LOSSES = ("train_loss", "test_loss")
ERRORS = ("train_mae", "test_mae")


def draw(comparison: Comparison, columns: Sequence[str]) -> Figure | None:
    """Draw columns of ``metrics.csv`` against training time and against epochs.

    With several seeds a line is their median and the band goes from the least to the greatest; against time,
    an epoch stands at its median time. A diverged run is a thin line that ends in a cross, at its last finite
    value or where it leaves the panel.

    Args:
        comparison: What to draw.
        columns: One row of panels each; columns without any value are left out.

    Returns:
        The figure, or ``None`` if no column has a value. Call it inside ``house_style``.
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
            draw_curves(axes, comparison.curves, styles, column, seconds, scale.high)
        scale.apply(list(row))
    for axes, name in zip(panels[-1], (f"training time ({unit_name})", "epoch"), strict=True):
        axes.set_xlabel(name)
        axes.set_xlim(left=0)
    panels[-1][1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    _add_texts(figure, comparison, styles)
    return figure


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    styles: Sequence[LineStyle],
    column: str,
    unit_s: float | None,
    high: float,
) -> None:
    """Draw one column of ``metrics.csv`` into a panel.

    Args:
        axes: The panel.
        curves: What to draw.
        styles: One for each curve.
        column: The column.
        unit_s: Seconds in the unit of the time axis; ``None`` draws against epochs.
        high: Upper end of the vertical axis, where a line that leaves it gets its cross.
    """
    for curve, style in zip(curves, styles, strict=True):
        _draw_finished(axes, curve, style, column, unit_s)
        _draw_diverged(axes, curve, style, column, unit_s, high)


def _draw_finished(axes: Axes, curve: Curve, style: LineStyle, column: str, unit_s: float | None) -> None:
    points = curve.points(column)
    if not points:
        return
    x, values = _positions(points, unit_s), [point.median for point in points]
    (line,) = axes.plot(x, values, color=style.color, linestyle=style.pattern, zorder=3)
    if len(points) == 1 or style.marked:
        line.set(marker="o", markersize=3.2, markevery=max(1, len(points) // 7), markeredgewidth=0.9)
        line.set_markerfacecolor("white" if style.marked else style.color)
    if len(curve.finished) > 1:
        low, high = [point.low for point in points], [point.high for point in points]
        axes.fill_between(x, low, high, color=style.color, alpha=0.18, linewidth=0, zorder=2)


def _draw_diverged(
    axes: Axes, curve: Curve, style: LineStyle, column: str, unit_s: float | None, high: float
) -> None:
    for run in curve.diverged:
        points = seed_points((run,), column)
        if not points:
            continue
        x, values = _positions(points, unit_s), [point.median for point in points]
        axes.plot(x, values, color=style.color, linestyle=style.pattern, linewidth=0.9, zorder=3)
        end = _end_inside(x, values, high)
        cross: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.5, "clip_on": False}
        axes.plot([end[0]], [end[1]], color=style.color, zorder=4, **cross)


def _end_inside(x: Sequence[float], values: Sequence[float], high: float) -> tuple[float, float]:
    """Return the last point of a line, or where it crosses ``high`` for good, on a logarithmic axis."""
    inside = [place for place, value in enumerate(values) if value <= high]
    last = inside[-1] if inside else -1
    if last == len(values) - 1:
        return x[-1], values[-1]
    if last < 0 or values[last] <= 0:
        return x[last + 1], high
    share = math.log(high / values[last]) / math.log(values[last + 1] / values[last])
    return x[last] + share * (x[last + 1] - x[last]), high


def _positions(points: Sequence[Point], unit_s: float | None) -> list[float]:
    return [point.epoch if unit_s is None else point.train_s / unit_s for point in points]


def legend_handle(curve: Curve, style: LineStyle) -> Line2D:
    """Return what stands for a curve in a legend.

    Args:
        curve: The curve.
        style: Its style.
    """
    if not curve.finished:
        return Line2D(
            [], [], color=style.color, linestyle=style.pattern, linewidth=0.9, marker="x", markersize=6
        )
    handle = Line2D([], [], color=style.color, linestyle=style.pattern)
    if style.marked:
        handle.set(marker="o", markersize=3.2, markerfacecolor="white", markeredgewidth=0.9)
    return handle


def _add_texts(figure: Figure, comparison: Comparison, styles: Sequence[LineStyle]) -> None:
    figure.suptitle(comparison.title, fontsize=9)
    notes = [] if any(len(curve.runs) > 1 for curve in comparison.curves) else ["1 seed"]
    if any(len(curve.finished) > 1 for curve in comparison.curves):
        notes.append("line: median over seeds; band: least to greatest")
    if any(curve.diverged for curve in comparison.curves):
        notes.append("×: diverged")
    if comparison.num_hidden:
        total = len(comparison.curves) + comparison.num_hidden
        notes.append(f"the {len(comparison.curves)} curves of {total} that end with the least training loss")
    time = f"time: training only, on {comparison.device}"
    legend = figure.legend(
        [legend_handle(curve, style) for curve, style in zip(comparison.curves, styles, strict=True)],
        [curve.legend for curve in comparison.curves],
        loc="outside lower center",
        ncols=_legend_columns(comparison),
        title="\n".join([time, *(["; ".join(notes)] if notes else [])]),
        title_fontsize=7,
        handlelength=3.2,
    )
    legend.get_title().set_color("#555555")
    legend.get_title().set_multialignment("center")


def _legend_columns(comparison: Comparison) -> int:
    return 2 if all(len(curve.legend) <= 45 for curve in comparison.curves) else 1
