"""Drawing one panel of the paper at the width of a column of text."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gramgn.errors import counted

from ._axes import time_unit, value_scale
from ._draw import draw_curves, legend_handle
from ._draw_grid import draw_grid
from ._group import Comparison, Curve
from ._panels import FigureSet, Panel
from ._style import line_styles

_WIDTH = 3.4


def draw_panel(panel: Panel, figures: FigureSet) -> Figure:
    """Draw one panel.

    Args:
        panel: One of ``figures.panels``. Call it inside ``house_style``.
        figures: Its figure set.
    """
    if panel.family == "grid":
        assert figures.grid is not None
        return draw_grid(figures.grid, panel.number)
    comparison = figures.curves[panel.family]
    print_lines = _small_print(comparison, panel)
    columns = 2 if all(len(_legend_text(curve, comparison)) <= 22 for curve in comparison.curves) else 1
    lines = -(-len(comparison.curves) // columns)
    figure = Figure(figsize=(_WIDTH, 2.3 + 0.135 * lines + 0.11 * len(print_lines)))
    figure.suptitle(f"{panel.number}  {comparison.title}", fontsize=7.5)
    axes = figure.subplots()
    fill_panel(axes, panel, comparison)
    legend = figure.legend(
        *legend_of(comparison),
        loc="outside lower center",
        ncols=columns,
        fontsize=7,
        title="\n".join(print_lines),
        title_fontsize=6,
        handlelength=3.2,
        labelspacing=0.25,
    )
    legend.get_title().set_color("#555555")
    legend.get_title().set_multialignment("center")
    return figure


def fill_panel(axes: Axes, panel: Panel, comparison: Comparison) -> None:
    """Draw the curves and axes of a panel.

    Args:
        axes: Where to draw.
        panel: Which column, against what.
        comparison: The curves.
    """
    scale = value_scale(comparison, panel.column)
    styles = line_styles(comparison.curves)
    unit_s, unit_name = time_unit(comparison)
    seconds = unit_s if panel.against_time else None
    high = scale.high if scale else 1.0
    draw_curves(axes, comparison.curves, styles, panel.column, seconds, high)
    if scale is not None:
        scale.apply([axes])
    axes.set_xlim(left=0)
    axes.set_xlabel(f"training time ({unit_name})" if panel.against_time else "epoch")
    if not panel.against_time:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def seeds_of(curves: Sequence[Curve]) -> str:
    """Return how many seeds curves have, e.g. ``"3 seeds"`` or ``"1 to 3 seeds"``."""
    counts = {len(curve.runs) for curve in curves}
    low, high = min(counts), max(counts)
    return f"{low} to {high} seeds" if low < high else f"{high} seed{'s' if high > 1 else ''}"


def legend_of(comparison: Comparison) -> tuple[list[Line2D], list[str]]:
    """Return handles and texts of the legend.

    Args:
        comparison: The curves.
    """
    styles = line_styles(comparison.curves)
    handles = [legend_handle(curve, style) for curve, style in zip(comparison.curves, styles, strict=True)]
    return handles, [_legend_text(curve, comparison) for curve in comparison.curves]


def _legend_text(curve: Curve, comparison: Comparison) -> str:
    """Return the label; the number of seeds only where curves differ in it, as the small print has it too."""
    count = len(curve.runs)
    notes = []
    if len({len(each.runs) for each in comparison.curves}) > 1:
        notes.append(f"{count} seed{'s' if count > 1 else ''}")
    if curve.diverged:
        notes.append(
            f"{len(curve.diverged)} diverged" if notes else f"{len(curve.diverged)} of {count} diverged"
        )
    return curve.label + (f" ({', '.join(notes)})" if notes else "")


def _small_print(comparison: Comparison, panel: Panel) -> list[str]:
    notes = [seeds_of(comparison.curves)]
    if any(len(curve.finished) > 1 for curve in comparison.curves):
        notes.append("line: median, band: least to greatest")
    if any(curve.diverged for curve in comparison.curves):
        notes.append("×: diverged")
    threads = {run.own_settings["threads"] for curve in comparison.curves for run in curve.runs}
    device = comparison.device + "".join(
        f", {counted(int(count), 'thread')}" for count in threads if isinstance(count, float)
    )
    return ["; ".join(notes), f"time: training only, on {device}" if panel.against_time else f"on {device}"]
