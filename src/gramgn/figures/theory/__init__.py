"""The theory's runs and costs, their figures and statements."""

from gramgn.figures.theory.figures import theory_figures
from gramgn.figures.theory.statements import theory_claims, theory_title
from gramgn.figures.theory.table import COST_FILE, Theory, is_cost_file, is_of_study, read_costs, theory_runs

__all__ = [
    "COST_FILE",
    "Theory",
    "is_cost_file",
    "is_of_study",
    "read_costs",
    "theory_claims",
    "theory_figures",
    "theory_runs",
    "theory_title",
]
