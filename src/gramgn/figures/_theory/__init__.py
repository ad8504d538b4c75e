"""The theory's files, figures and statements."""

from ._claims import THEORY_TITLE, theory_claims
from ._figures import TheoryFigure, theory_figures
from ._files import find_theory, is_theory_file, read_theory, write_theory
from ._records import Cost, Epoch, Setting, Theory, TheoryRun

__all__ = [
    "THEORY_TITLE",
    "Cost",
    "Epoch",
    "Setting",
    "Theory",
    "TheoryFigure",
    "TheoryRun",
    "find_theory",
    "is_theory_file",
    "read_theory",
    "theory_claims",
    "theory_figures",
    "write_theory",
]
