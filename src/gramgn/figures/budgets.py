"""Figures of the protocol's comparison: loss at the end of a budget, loss against epoch, and what a setting changes.

A column of panels is a data set; all columns share one legend. Call everything here inside `house_style`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from textwrap import fill

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gramgn.figures.axes import time_unit, value_scale
from gramgn.figures.curves import Comparison, Curve, device_name, run_label
from gramgn.figures.draw import draw_curves, draw_panel, legend_handle, seeds_of
from gramgn.figures.panels import Panel
from gramgn.figures.style import LineStyle, explain, line_styles
from gramgn.records import at_end, baselines

CHARACTERS_PER_INCH = 18
"""Of a caption."""


def draw_budgets(sets: Mapping[str, pd.DataFrame], ours: Collection[str]) -> Figure:
    """Draw validation loss at the end of a budget against its epochs and, where they are known, its seconds.

    A panel shows the two strongest baselines and ours; a dotted line is the strongest baseline's best median, the
    target. A budget with a diverged seed has no point.

    Args:
        sets: Rows of `runs` by the title of a column; `train_s` is NaN where it was not measured.
        ours: The methods that are no baselines, e.g. `"ggn_spring on resnet_gn"`.
    """
    columns, targets = {}, []
    for title, rows in sets.items():
        ends = at_end(rows)
        ranked = baselines(ends, ours=ours)
        shown = [*(method for method, _ in ranked[:2]), *ours]
        columns[title] = _comparison(title, ends[ends.method.isin(shown)], shown, ours, x="epochs")
        best = ends[(ends.method == ranked[0][0]) & (ends.epochs == ranked[0][1])]
        targets.append((float(best.val_loss.median()), run_label(best)))
    is_timed = all(rows.train_s.notna().any() for rows in sets.values())
    rows_of_panels = [("val_loss", False), *([("val_loss", True)] if is_timed else [])]
    figure = _matrix(
        columns,
        rows_of_panels,
        "after the last epoch of a budget; {}; line: median, bar: least to greatest",
        is_ends=True,
    )
    for place, axes in enumerate(figure.axes):
        target, name = targets[place % len(targets)]
        axes.axhline(target, color="#555555", linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1)
        if place < len(targets):
            words = f"target: {target:.3g}, {name}"
            axes.text(0, 1.03, words, fontsize=6.5, color="#555555", transform=axes.transAxes)
            axes.set_xticks(sorted(set(columns[axes.get_title(loc="left")].rows.epochs)))
    return figure


def draw_lengths(sets: Mapping[str, pd.DataFrame], ours: Collection[str]) -> Figure:
    """Draw training and test loss against epoch for all methods that ran for the whole length.

    Args:
        sets: See `draw_budgets`.
        ours: See `draw_budgets`.
    """
    columns = {}
    for title, rows in sets.items():
        rows = rows[rows.epochs == rows.epochs.max()]
        rows = rows.assign(method=rows.optimizer + " on " + rows.model)
        methods = [*(method for method, _ in baselines(at_end(rows), ours=ours)), *ours]
        columns[title] = _comparison(title, rows, methods, ours)
    panels = [("train_loss", False), ("test_loss", False)]
    return _matrix(columns, panels, "the whole length; {}; line: median, band: least to greatest")


def draw_study(lines: Mapping[str, pd.DataFrame], title: str, column: str, x: str = "epoch") -> Figure:
    """Draw a metric against epoch, or its value at the end against a setting, one line per entry.

    Args:
        lines: Rows of `runs` by label.
        title: What is varied, on which data.
        column: A loss or an error.
        x: `"epoch"`, or a column of settings, e.g. `"batch_size"`, for a logarithmic axis.
    """
    curves = [
        Curve(label, rows if x == "epoch" else _ends(at_end(rows), x), has_own_style=False)
        for label, rows in lines.items()
    ]
    figure = draw_panel(Panel("", "", "", column, False, ""), Comparison("", title, tuple(curves)))
    (axes,) = figure.axes
    axes.set_ylabel(axes.get_ylabel().replace(" (", "\n("))
    if x != "epoch":
        values = sorted({value for curve in curves for value in curve.rows.epoch})
        axes.set_xlim(values[0] / 1.2, values[-1] * 1.2)
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(x.replace("_", " "))
    return figure


def _add_bars(
    axes: Axes, curves: Sequence[Curve], styles: Sequence[LineStyle], column: str, unit_s: float | None
) -> None:
    """Mark the points of curves and their ranges: a line between three budgets would hide where they are."""
    for curve, style in zip(curves, styles, strict=True):
        points = curve.points(column)
        x = points.index if unit_s is None else points.train_s / unit_s
        axes.vlines(x, points.low, points.high, color=style.color, linewidth=1.2, zorder=3)
        face = "white" if style.marked else style.color
        axes.plot(x, points["median"], "o", color=style.color, markersize=3.2, markerfacecolor=face, zorder=4)


def _ends(ends: pd.DataFrame, x: str) -> pd.DataFrame:
    """Return ends of runs as the rows of one curve along `x`: a seed counts as one run, a loss of infinity as none."""
    return ends.assign(epoch=ends[x].astype(float), run=ends.seed.astype(str), state="done")


def _comparison(
    title: str, rows: pd.DataFrame, methods: Sequence[str], ours: Collection[str], x: str = ""
) -> Comparison:
    curves = []
    for method in methods:
        own = rows[rows.method == method]
        if len(own):
            curves.append(Curve(run_label(own), _ends(own, x) if x else own, is_ours=method in ours))
    return Comparison(title, title, tuple(curves))


def _matrix(
    columns: Mapping[str, Comparison], panels: Sequence[tuple[str, bool]], note: str, *, is_ends: bool = False
) -> Figure:
    """Draw panels of (metric, whether against seconds), one row each, with a column per comparison."""
    every = {curve.label: curve for comparison in columns.values() for curve in comparison.curves}
    styles: dict[str, LineStyle] = dict(zip(every, line_styles(list(every.values())), strict=True))
    figure = Figure(figsize=(max(3.4, 0.6 + 2.15 * len(columns)), 0.9 + 1.9 * len(panels)))
    grid = figure.subplots(len(panels), len(columns), squeeze=False)
    for place, comparison in enumerate(columns.values()):
        grid[0][place].set_title(comparison.title, fontsize=8, loc="left", pad=12)
        for axes, (column, against_time) in zip(grid[:, place], panels, strict=True):
            scale = value_scale(comparison, column)
            if scale is None:
                continue
            unit_s, unit_name = time_unit(comparison)
            own = [styles[curve.label] for curve in comparison.curves]
            draw_curves(axes, comparison.curves, own, column, unit_s if against_time else None, scale)
            if is_ends:
                _add_bars(axes, comparison.curves, own, column, unit_s if against_time else None)
            replace(scale, label=scale.label.replace(" (", "\n(") if place == 0 else "").apply([axes])
            axes.set_xlim(left=0)
            name = f"training time ({unit_name})" if against_time else "epochs" if is_ends else "epoch"
            axes.set_xlabel(name if is_ends or axes is grid[-1][place] else "")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    rows = pd.concat([comparison.rows for comparison in columns.values()])
    lines = note.format(seeds_of(list(every.values()))), f"on {device_name(rows)}, 1 thread"
    title = "\n".join(fill(line, int(CHARACTERS_PER_INCH * figure.get_figwidth())) for line in lines)
    handles = [legend_handle(curve, styles[label]) for label, curve in every.items()]
    explain(
        figure,
        handles,
        list(every),
        title,
        ncols=min(len(columns), len(every)),
        title_fontsize=7,
        handlelength=3.2,
    )
    return figure
