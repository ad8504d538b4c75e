"""Figures, tables and claims from the table of runs: no network, no torch.

    from gramgn.figures import make_figures, read_runs

    make_figures(read_runs("outputs/sweeps/lam"), Path("figures"))

`gramgn.figures.panels` states which runs belong to which panel of the paper.
"""

from gramgn.figures.budgets import draw_budgets, draw_lengths, draw_study
from gramgn.figures.build import drawings, make_figures
from gramgn.figures.claims import (
    CLOSE_TO_ZERO,
    Claim,
    Measurement,
    claims,
    claims_table,
    claims_text,
    ratio_at_common_end,
    speed,
)
from gramgn.figures.curves import Comparison, Curve, run_label
from gramgn.figures.drawing import THEORY, Drawing
from gramgn.figures.first_epochs import draw_first_epochs, rows_by_seed
from gramgn.figures.grid import Grid, GridCell, make_grid
from gramgn.figures.heatmap import draw_grid
from gramgn.figures.panels import PANELS, FigureSet, Panel, figure_sets
from gramgn.figures.sources import Shown, read_runs, read_table
from gramgn.figures.style import house_style
from gramgn.figures.summary import summary_table
from gramgn.figures.theory import Theory, theory_claims, theory_runs, theory_title

__all__ = [
    "CLOSE_TO_ZERO",
    "PANELS",
    "THEORY",
    "Claim",
    "Comparison",
    "Curve",
    "Drawing",
    "FigureSet",
    "Grid",
    "GridCell",
    "Measurement",
    "Panel",
    "Shown",
    "Theory",
    "claims",
    "claims_table",
    "claims_text",
    "draw_budgets",
    "draw_first_epochs",
    "draw_grid",
    "draw_lengths",
    "draw_study",
    "drawings",
    "figure_sets",
    "house_style",
    "make_figures",
    "make_grid",
    "ratio_at_common_end",
    "read_runs",
    "read_table",
    "rows_by_seed",
    "run_label",
    "speed",
    "summary_table",
    "theory_claims",
    "theory_runs",
    "theory_title",
]
