"""One self-contained HTML page about all runs: claims, figures, a table, every run's settings. No torch, no network."""

from gramgn.report.page import make_report

__all__ = ["make_report"]
