"""The theory's runs and costs, their figures and statements."""

from gramgn.figures.theory.figures import theory_figures
from gramgn.figures.theory.records import (
    COST_FILE,
    Cost,
    Epoch,
    Setting,
    Theory,
    TheoryRun,
    is_cost_file,
    is_of_study,
    read_costs,
    runs_of_theory,
)
from gramgn.figures.theory.statements import theory_claims, theory_title

__all__ = [
    "COST_FILE",
    "Cost",
    "Epoch",
    "Setting",
    "Theory",
    "TheoryRun",
    "is_cost_file",
    "is_of_study",
    "read_costs",
    "runs_of_theory",
    "theory_claims",
    "theory_figures",
    "theory_title",
]
