"""What a figure shows, in words, for readers who cannot see it."""

from __future__ import annotations

from collections import Counter

from gramgn.figures import Comparison, Drawing, FigureSet, Grid
from gramgn.report.run_table import number_text

_COLUMNS = {"train_loss": "training loss", "test_loss": "test loss"}


def alt_text(drawing: Drawing, figures: FigureSet | None) -> str:
    """Return the text that stands for a figure.

    Args:
        drawing: The figure.
        figures: Its figure set, if it has one.
    """
    if drawing.grid is not None:
        return _grid_text(drawing.grid)
    if drawing.panel is not None and figures is not None:
        axis = "training time" if drawing.panel.against_time else "epochs"
        ends = _ends(figures.curves[drawing.panel.family], drawing.panel.column)
        return f"Lines of the {_COLUMNS[drawing.panel.column]} against {axis}, logarithmic: {ends}."
    if figures is not None:
        numbers = ", ".join(dict.fromkeys(panel.number for panel in figures.panels))
        return f"The figures {numbers} above, together on one page."
    return (
        drawing.alt
        or f"{drawing.title}: lines against training time on the left, against epochs on the right."
    )


def _ends(comparison: Comparison, column: str) -> str:
    """Return where the curves end."""
    ends = []
    for curve in comparison.curves:
        points = curve.points(column)
        if points.empty:
            ends.append(f"{curve.legend} has no finished run")
            continue
        last = points.iloc[-1]
        band = f" ({number_text(last.low)} to {number_text(last.high)})" if curve.num_finished > 1 else ""
        ends.append(
            f"{curve.legend} is at {number_text(last['median'])}{band} after epoch {points.index[-1]}"
        )
    return "; ".join(ends)


def _grid_text(grid: Grid) -> str:
    states = Counter(grid.cell(lam, alpha).state for lam in grid.lams for alpha in grid.alphas)
    finite = {pair: cell.loss for pair, cell in grid.cells.items() if cell.loss is not None}
    text = (
        f"Heat map of the training loss at epoch {grid.epoch}, lighter is higher: lambda from {grid.lams[0]:g} to "
        f"{grid.lams[-1]:g}, alpha from {grid.alphas[0]:g} to {grid.alphas[-1]:g} ({grid.convention} convention). "
        "Cells: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items())) + "."
    )
    if not finite:
        return text
    best, worst = min(finite, key=lambda pair: finite[pair]), max(finite, key=lambda pair: finite[pair])
    return text + (
        f" The least loss is {number_text(finite[best])} at lambda {best[0]:g}, alpha {best[1]:g}; the greatest is "
        f"{number_text(finite[worst])} at lambda {worst[0]:g}, alpha {worst[1]:g}."
    )
