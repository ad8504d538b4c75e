"""What tests of figures look at: the one figure set of a folder of runs, its panels drawn, the words in them."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from gramgn.figures import FigureSet, Grid, figure_sets, load_runs
from gramgn.figures._draw_panel import draw_panel
from gramgn.figures._style import house_style


def only_set(root: Path) -> FigureSet:
    """Return the figure set of the runs below a folder, which give exactly one."""
    (figures,), _ = figure_sets(load_runs(root))
    return figures


def only_grid(root: Path) -> Grid:
    """Return figure 2c of the runs below a folder."""
    grid = only_set(root).grid
    assert grid is not None
    return grid


def drawn(figures: FigureSet, key: str) -> Figure:
    """Draw one panel, e.g. ``"fig1a"``."""
    (panel,) = (panel for panel in figures.panels if panel.key == key)
    with house_style():
        return draw_panel(panel, figures)


def texts(figure: Figure) -> str:
    """Return all words of a figure, legends included."""
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda each: hasattr(each, "get_text")))


def silent(line: str) -> None:
    """Take a report and forget it."""
