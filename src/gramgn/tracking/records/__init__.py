"""The truth about runs and sweeps on disk, in plain Python: ``run.json``, ``metrics.csv``, ``sweep.json``.

Nothing here imports a sibling package, torch, hydra or wandb, so that figures and status tools stay light.
"""

from ._atomic import atomic_file, write_atomic
from ._metrics import INTEGER_COLUMNS, METRIC_COLUMNS, Row
from ._run_folder import FORMAT, STATES, RunFolder, find_runs
from ._sweep import (
    CELL_STATES,
    LOCK_FILE,
    SWEEP_FILE,
    SWEEP_FORMAT,
    CellStatus,
    SweepFolder,
    code_version,
    code_versions,
    count_states,
    find_sweeps,
    is_locked,
    run_status,
    varying,
)

__all__ = [
    "CELL_STATES",
    "FORMAT",
    "INTEGER_COLUMNS",
    "LOCK_FILE",
    "METRIC_COLUMNS",
    "STATES",
    "SWEEP_FILE",
    "SWEEP_FORMAT",
    "CellStatus",
    "Row",
    "RunFolder",
    "SweepFolder",
    "atomic_file",
    "code_version",
    "code_versions",
    "count_states",
    "find_runs",
    "find_sweeps",
    "is_locked",
    "run_status",
    "varying",
    "write_atomic",
]
