"""The theory's files, figures and statements."""

from ._claims import theory_claims, theory_title
from ._comparable import comparable
from ._figures import TheoryFigure, theory_figures
from ._files import find_theory, is_theory_file, read_theory, write_theory
from ._records import Cost, Epoch, Setting, Theory, TheoryRun

__all__ = [
    "Cost",
    "Epoch",
    "Setting",
    "Theory",
    "TheoryFigure",
    "TheoryRun",
    "comparable",
    "find_theory",
    "is_theory_file",
    "read_theory",
    "theory_claims",
    "theory_figures",
    "theory_title",
    "write_theory",
]
