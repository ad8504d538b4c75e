"""Sweeps: every job in a fresh process, all of them checked before the first, completed by the same command.

Hydra's plugins in `hydra_plugins.gramgn_sweep` compose the jobs. `Sweep` (`session.py`) decides by `review.py` what is
to be done about each, and a `Pool` of processes runs `job.py`. Importing this package does not import torch.
"""

from gramgn.sweep.axes import (
    axes_of,
    check_overrides,
    extended,
    grid_text,
    read_settings,
    with_points,
)
from gramgn.sweep.display import Display, Outcome, closing_table
from gramgn.sweep.options import Options, num_cores, read_options
from gramgn.sweep.resources import Resources, read_resources
from gramgn.sweep.review import Cell, review
from gramgn.sweep.session import Sweep
from gramgn.sweep.summary import draw_heatmap

__all__ = [
    "Cell",
    "Display",
    "Options",
    "Outcome",
    "Resources",
    "Sweep",
    "axes_of",
    "check_overrides",
    "closing_table",
    "draw_heatmap",
    "extended",
    "grid_text",
    "num_cores",
    "read_options",
    "read_resources",
    "read_settings",
    "review",
    "with_points",
]
