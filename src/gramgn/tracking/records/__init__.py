"""The truth about a run on disk, in plain Python: ``run.json``, ``metrics.csv``, atomic writes.

Nothing here imports a sibling package, torch, hydra or wandb, so that figures and status tools stay light.
"""

from ._atomic import atomic_file, write_atomic
from ._metrics import INTEGER_COLUMNS, METRIC_COLUMNS, Row
from ._run_folder import FORMAT, STATES, RunFolder, find_runs

__all__ = [
    "FORMAT",
    "INTEGER_COLUMNS",
    "METRIC_COLUMNS",
    "STATES",
    "Row",
    "RunFolder",
    "atomic_file",
    "find_runs",
    "write_atomic",
]
