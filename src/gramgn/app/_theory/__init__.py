"""The theory's studies: what ``make theory`` runs, file by file, and how it goes on where it was stopped."""

from ._run import run_studies
from ._studies import FULL, SMOKE, STUDIES

__all__ = ["FULL", "SMOKE", "STUDIES", "run_studies"]
