"""Drawing all panels of the paper on one page."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from gramgn.figures.curves import Curve
from gramgn.figures.draw import fill_panel, legend_handle, legend_of, seeds_of
from gramgn.figures.heatmap import fill_grid, grid_handles, seeds_text
from gramgn.figures.panels import PANELS, FigureSet, Panel, short_data
from gramgn.figures.style import explain, line_styles

_LABEL = 7.0  # points


def draw_page(figures: FigureSet) -> Figure:
    """Draw all panels of a set on one page; a panel without runs says how they are made."""
    figure = Figure(figsize=(6.9, 9.6))
    kind = "SYNTHETIC stand-in images" if figures.kind == "synthetic" else "real images"
    figure.suptitle(f"Figures 1 and 2 on {kind}, {figures.scale} scale, on {figures.device}", fontsize=9)
    rows = figure.add_gridspec(2, 2, height_ratios=(2.35, 1))
    upper = figure.add_subfigure(rows[0, :])
    for axes, panel in zip(upper.subplots(3, 2).ravel(), PANELS[:6], strict=True):
        axes.set_title(_title(panel, figures), fontsize=7, pad=6)
        _fill(axes, panel, figures)
    _add_legend(upper, figures)
    for column, panel in enumerate(PANELS[6:]):
        part = figure.add_subfigure(rows[1, column])
        part.suptitle(_title(panel, figures), fontsize=6.5)
        _fill(part.subplots(), panel, figures)
        if panel not in figures.panels:
            continue
        if panel.family == "grid":
            assert figures.grid is not None
            part.legend(handles=grid_handles(figures.grid), loc="outside lower center", ncols=3, fontsize=6)
        else:
            handles, texts = legend_of(figures.curves[panel.family])
            part.legend(handles, texts, loc="outside lower center", ncols=2, fontsize=6, handlelength=3.2)
    return figure


def _fill(axes: Axes, panel: Panel, figures: FigureSet) -> None:
    if panel not in figures.panels:
        _say_missing(axes, panel)
        return
    if panel.family == "grid":
        assert figures.grid is not None
        fill_grid(axes, figures.grid)
    else:
        fill_panel(axes, panel, figures.curves[panel.family])
    axes.xaxis.label.set_fontsize(_LABEL)
    axes.yaxis.label.set_fontsize(_LABEL)
    axes.tick_params(labelsize=6.5)


def _title(panel: Panel, figures: FigureSet) -> str:
    if panel not in figures.panels:
        return panel.number
    if panel.family == "grid":
        assert figures.grid is not None
        return f"2c  {short_data(figures.grid.rows)}, {seeds_text(figures.grid)}"
    curves = figures.curves[panel.family].curves
    return f"{panel.number}  {short_data(curves[0].rows)}, {seeds_of(curves)}"


def _say_missing(axes: Axes, panel: Panel) -> None:
    axes.set_axis_off()
    text = f"no runs; make some with\n{panel.command}"
    style: dict[str, Any] = {"ha": "center", "va": "center", "size": 6, "color": "#777777"}
    axes.text(0.5, 0.5, text, transform=axes.transAxes, **style)


def _add_legend(figure: SubFigure, figures: FigureSet) -> None:
    """Explain the curves of figures 1 and 2a once, for all their panels."""
    curves: dict[str, Curve] = {}
    for family in ("afad", "rsna"):
        if family in figures.curves:
            curves = {curve.label: curve for curve in figures.curves[family].curves} | curves
    if not curves:
        return
    styles = line_styles(list(curves.values()))
    handles = [legend_handle(curve, style) for curve, style in zip(curves.values(), styles, strict=True)]
    title = "line: median over seeds; band: least to greatest; ×: diverged; time: training only"
    style = {
        "ncols": len(curves),
        "fontsize": 7,
        "title_fontsize": 6.5,
        "handlelength": 3.2,
        "columnspacing": 1.2,
    }
    explain(figure, handles, list(curves), title, **style)
