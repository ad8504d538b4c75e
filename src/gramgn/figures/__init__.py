"""Figures and tables from run folders. Reads ``run.json`` and ``metrics.csv`` only: no network, no torch."""

from ._build import finished_runs, make_figures
from ._load import Run, load_runs
from ._table import summary_table

__all__ = ["Run", "finished_runs", "load_runs", "make_figures", "summary_table"]
