"""Figures, tables and claims from run folders or results files: no network, no torch."""

from ._build import THEORY, Drawing, drawings, finished_runs, make_figures
from ._claims import Claim, Measurement, claims, claims_table, claims_text
from ._columns import RESULT_COLUMNS
from ._grid import Cell, Grid
from ._load import Loaded, load_runs
from ._panels import PANELS, FigureSet, Panel
from ._results import read_results, summary_of, write_results
from ._run import Run
from ._sort import figure_sets
from ._table import summary_table
from ._theory import (
    Cost,
    Epoch,
    Setting,
    Theory,
    TheoryRun,
    read_theory,
    theory_claims,
    theory_title,
    write_theory,
)

__all__ = [
    "PANELS",
    "RESULT_COLUMNS",
    "THEORY",
    "Cell",
    "Claim",
    "Cost",
    "Drawing",
    "Epoch",
    "FigureSet",
    "Grid",
    "Loaded",
    "Measurement",
    "Panel",
    "Run",
    "Setting",
    "Theory",
    "TheoryRun",
    "claims",
    "claims_table",
    "claims_text",
    "drawings",
    "figure_sets",
    "finished_runs",
    "load_runs",
    "make_figures",
    "read_results",
    "read_theory",
    "summary_of",
    "summary_table",
    "theory_claims",
    "theory_title",
    "write_results",
    "write_theory",
]
