"""One self-contained HTML page about all runs: claims, figures, a table, every run's settings. No torch, no network."""

from ._build import make_report

__all__ = ["make_report"]
