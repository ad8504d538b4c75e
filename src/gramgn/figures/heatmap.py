"""Drawing figure 2c: grey by loss, lighter where it is higher, and other marks where there is no loss."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gramgn.figures.axes import LARGEST, SMALLEST
from gramgn.figures.curves import device_name, is_standardized, unit_of
from gramgn.figures.grid import EPOCH, Grid, GridCell
from gramgn.figures.style import explain

# Neither black nor white: a frame stays visible on the darkest cell, and white is left for "not run".
_GREYS = LinearSegmentedColormap.from_list("greys", ["#1C1C1C", "#EDEDED"])
_BEST = "#D55E00"


# How a cell without a loss looks: its colour (light, so that the sign stands out in grey as well), the sign in it, its
# hatching, and its name in the legend.
_MARKS = {
    "diverged": ("#F7D9C4", "×", "", "× diverged"),
    "failed": ("#CFE8F7", "!", "", "! failed"),
    "unfinished": ("#FFFFFF", "…", "", "… not finished"),
    "not run": ("#FFFFFF", "", "/////", "not run"),
}


def draw_grid(grid: Grid, number: str = "") -> Figure:
    """Draw figure 2c, or another grid, at the width of a column of text."""
    figure = Figure(figsize=(3.4, 1.75 + 0.185 * max(len(grid.alphas), 5)))
    figure.suptitle(f"{number}  {grid.title}".strip(), fontsize=7.5)
    axes = figure.subplots()
    fill_grid(axes, grid)
    handles = grid_handles(grid)
    title = f"{seeds_text(grid)}; on {device_name(grid.rows)}"
    style = {"ncols": 3, "fontsize": 6.5, "title_fontsize": 6.5, "handlelength": 1.2, "columnspacing": 1.2}
    explain(figure, handles, [str(handle.get_label()) for handle in handles], title, **style)
    return figure


def fill_grid(axes: Axes, grid: Grid) -> None:
    """Draw the cells, axes and colour bar into a panel."""
    norm = _norm(grid)
    best = grid.best_alphas()
    axes.grid(visible=False)
    for x, lam in enumerate(grid.lams):
        for y, alpha in enumerate(grid.alphas):
            _draw_cell(axes, x, y, grid.cell(lam, alpha), norm)
            if alpha == best.get(lam):
                _frame(axes, x, y)
        if {grid.cell(lam, alpha).state for alpha in grid.alphas} - {"not run"} == {"diverged"}:
            axes.text(x, len(grid.alphas) - 0.42, "all\ndiverged", ha="center", va="bottom", size=5.5)
    axes.set_xlim(-0.5, len(grid.lams) - 0.5)
    axes.set_ylim(-0.5, len(grid.alphas) - 0.5)
    axes.set_xticks(range(len(grid.lams)), [f"{lam:g}" for lam in grid.lams])
    axes.set_yticks(range(len(grid.alphas)), [f"{alpha:g}" for alpha in grid.alphas])
    axes.tick_params(length=2)
    axes.set_xlabel("λ")
    axes.set_ylabel(f"α ({grid.convention} convention)")
    _add_bar(axes, grid, norm)


def grid_handles(grid: Grid) -> list[Patch]:
    """Return the legend of the marks that occur."""
    cells = [grid.cell(lam, alpha) for lam in grid.lams for alpha in grid.alphas]
    states = {cell.state for cell in cells}
    handles = [
        Patch(facecolor=face, edgecolor="#888888", hatch=hatch, linewidth=0.5, label=name)
        for state, (face, _, hatch, name) in _MARKS.items()
        if state in states
    ]
    if "finite" in states:
        handles.insert(0, Patch(fill=False, edgecolor=_BEST, linewidth=1.5, label="best α of a λ"))
    if any(cell.state == "finite" and cell.num_diverged for cell in cells):
        handles.append(Patch(fill=False, linewidth=0, label="n×: n seeds diverged"))
    return handles


def seeds_text(grid: Grid) -> str:
    """Return how many seeds a cell has, e.g. `"median of 3 seeds"`."""
    counts = grid.losses.groupby(["lam", "alpha"]).size()
    low, high = counts.min(), counts.max()
    if high == 1:
        return "1 seed"
    return f"median of {high} seeds" if low == high else f"median of {low} to {high} seeds"


def _draw_cell(axes: Axes, x: int, y: int, cell: GridCell, norm: LogNorm) -> None:
    corner = (x - 0.5, y - 0.5)
    if cell.loss is None:
        face, sign, hatch, _ = _MARKS[cell.state]
        style: dict[str, Any] = {"facecolor": face, "edgecolor": "#BBBBBB", "hatch": hatch, "linewidth": 0.4}
        axes.add_patch(Rectangle(corner, 1, 1, zorder=2, **style))
        axes.text(x, y, sign, ha="center", va="center_baseline", size=7, color="#333333", zorder=3)
        return
    shade = float(norm(max(cell.loss, norm.vmin or 0.0)))
    axes.add_patch(
        Rectangle(corner, 1, 1, facecolor=_GREYS(shade), edgecolor="white", linewidth=0.4, zorder=2)
    )
    color = "white" if shade < 0.55 else "black"
    axes.text(x, y, _number(cell.loss), ha="center", va="center_baseline", size=6, color=color, zorder=3)
    if cell.num_diverged:
        note = f"{cell.num_diverged}×"
        axes.text(x + 0.45, y + 0.42, note, ha="right", va="top", size=4.5, color=color, zorder=3)


def _frame(axes: Axes, x: int, y: int) -> None:
    """Frame a cell; the white next to the colour shows it on dark cells in grey print."""
    style: dict[str, Any] = {"fill": False, "zorder": 4, "clip_on": False}
    for color, width in (("white", 2.8), (_BEST, 1.3)):
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, edgecolor=color, linewidth=width, **style))


def _norm(grid: Grid) -> LogNorm:
    """Return the scale of the greys; overshoot above thirty times the variance is not resolved."""
    losses = [cell.loss for cell in grid.cells.values() if cell.loss is not None and cell.loss > 0]
    low, high = (min(losses), max(losses)) if losses else (1.0, 1.0)
    ceiling = 30.0 if is_standardized(grid.rows) else 1e3 * low
    low = min(max(low, SMALLEST), LARGEST)
    high = min(max(min(high, ceiling), 1.2 * low), 1.2 * LARGEST)
    return LogNorm(low, high, clip=True)


def _add_bar(axes: Axes, grid: Grid, norm: LogNorm) -> None:
    if not any(cell.loss for cell in grid.cells.values()):
        return  # every loss is missing or zero: there is no scale
    above = any(cell.loss is not None and cell.loss > (norm.vmax or math.inf) for cell in grid.cells.values())
    bar = axes.figure.colorbar(
        ScalarMappable(norm, _GREYS), ax=axes, extend="max" if above else "neither", pad=0.03, aspect=25
    )
    unit = "" if unit_of(grid.rows) == "1" else f", {unit_of(grid.rows)}²"
    if is_standardized(grid.rows):
        unit = ", standardised"
    last = "" if grid.epoch == EPOCH else " (the last)"
    bar.set_label(f"training loss at epoch {grid.epoch}{last}\n(MSE{unit})", size=7)
    span = math.log10((norm.vmax or 1.0) / (norm.vmin or 1.0))
    bar.ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if span > 2.5 else (1.0, 2.0, 5.0)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(length=2, labelsize=6.5)
    bar.outline.set_linewidth(0.5)


def _number(value: float) -> str:
    """Return two digits in at most six letters."""
    if value == 0:
        return "0"
    if 0.001 <= value < 1000:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
