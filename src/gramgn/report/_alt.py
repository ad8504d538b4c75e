"""What a figure shows, in words, for readers who cannot see it."""

from __future__ import annotations

from collections import Counter

from gramgn.figures import FigureSet, Grid, Panel

from ._table import number_text

_COLUMNS = {"train_loss": "training loss", "test_loss": "test loss", "val_loss": "validation loss"}


def panel_alt(panel: Panel, figures: FigureSet) -> str:
    """Return the text for one panel: axes, curves and where they end, or the cells of the grid.

    Args:
        panel: One of ``figures.panels``.
        figures: The set it is drawn from.
    """
    if panel.family == "grid":
        assert figures.grid is not None, "only a set with a grid has this panel"
        return grid_alt(figures.grid)
    column = _COLUMNS.get(panel.column, panel.column)
    axis = "training time" if panel.against_time else "epochs"
    curves = figures.curves[panel.family].curves
    ends = []
    for curve in curves:
        points = curve.points(panel.column)
        if points:
            last = points[-1]
            band = (
                f" ({number_text(last.low)} to {number_text(last.high)})" if len(curve.finished) > 1 else ""
            )
            ends.append(f"{curve.legend} is at {number_text(last.median)}{band} after epoch {last.epoch}")
        else:
            ends.append(f"{curve.legend} has no finished run")
    return f"Lines of the {column} against {axis}, logarithmic: {'; '.join(ends)}."


def set_title(figures: FigureSet) -> str:
    """Return what all figures of a set have in common.

    Args:
        figures: The set.
    """
    kind = "SYNTHETIC" if figures.kind == "synthetic" else figures.kind
    return f"{kind} data, {figures.scale} scale, {figures.device}"


def grid_alt(grid: Grid) -> str:
    """Return the text for a heatmap: its axes, its cells, and where the loss is least and greatest.

    Args:
        grid: What it shows.
    """
    states = Counter(grid.cell(lam, alpha).state for lam in grid.lams for alpha in grid.alphas)
    finite = {pair: cell.loss for pair, cell in grid.cells.items() if cell.loss is not None}
    text = (
        f"Heat map of the training loss at epoch {grid.epoch}, lighter is higher: lambda from {grid.lams[0]:g} to "
        f"{grid.lams[-1]:g}, alpha from {grid.alphas[0]:g} to {grid.alphas[-1]:g} ({grid.convention} convention). "
        "Cells: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items())) + "."
    )
    if finite:
        best, worst = min(finite, key=lambda pair: finite[pair]), max(finite, key=lambda pair: finite[pair])
        text += (
            f" The least loss is {number_text(finite[best])} at lambda {best[0]:g}, alpha {best[1]:g}; the greatest "
            f"{number_text(finite[worst])} at lambda {worst[0]:g}, alpha {worst[1]:g}."
        )
    return text
