"""Figures, tables and claims from run folders or results files: no network, no torch."""

from ._build import Drawing, drawings, finished_runs, make_figures
from ._claims import Claim, Measurement, claims, claims_table
from ._columns import RESULT_COLUMNS
from ._grid import Cell, Grid
from ._load import Loaded, load_runs
from ._panels import PANELS, FigureSet, Panel
from ._results import read_results, summary_of, write_results
from ._run import Run
from ._sort import figure_sets
from ._table import summary_table

__all__ = [
    "PANELS",
    "RESULT_COLUMNS",
    "Cell",
    "Claim",
    "Drawing",
    "FigureSet",
    "Grid",
    "Loaded",
    "Measurement",
    "Panel",
    "Run",
    "claims",
    "claims_table",
    "drawings",
    "figure_sets",
    "finished_runs",
    "load_runs",
    "make_figures",
    "read_results",
    "summary_of",
    "summary_table",
    "write_results",
]
