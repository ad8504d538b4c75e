"""The records of runs and sweeps on disk, and the one answer to every question about them.

A run's folder holds `run.json` (state, configuration, provenance) and `metrics.csv` (one row per epoch); a sweep's
folder holds `sweep.json`. `runs()` returns all of them as one `pandas.DataFrame`, one row per run and epoch:

    from gramgn.records import runs

    table = runs("outputs")  # or runs("outputs/results/paper_laptop_synthetic.csv")
    table[table.state == "done"].groupby(["experiment", "epoch"]).train_loss.median()

`identity` decides what makes two runs the same, `queries` what the loss of a cell and the best alpha are. Nothing here
imports another package of gramgn, torch, Hydra or W&B; pandas is imported when a table is requested.
"""

from gramgn.records.budgets import Verdict, at_end, baselines, time_to_target, verdicts, with_seconds
from gramgn.records.columns import METRIC_NAMES, RESULT_COLUMNS
from gramgn.records.files import atomic_file, write_atomic
from gramgn.records.identity import (
    RESUMABLE,
    SETTING_COLUMNS,
    checkpoint_identity,
    differing,
    flat,
    identifying,
    is_incidental,
    other_settings,
    override_key,
    path_override,
    settings,
    short_hash,
    with_added,
)
from gramgn.records.metrics import (
    AVERAGE_COLUMNS,
    INTEGER_COLUMNS,
    METRIC_COLUMNS,
    Row,
    idle_epochs_note,
)
from gramgn.records.provenance import git_state, portable, processor_name, start_record, versions
from gramgn.records.queries import (
    DATA_COLUMNS,
    ENDED,
    best_alphas,
    final_loss,
    loss_grid,
    newest,
    same_setting,
)
from gramgn.records.results import write_results
from gramgn.records.run_folder import LOG_FILE, RunFolder, find_runs
from gramgn.records.schema import ENTRIES, WAITING
from gramgn.records.sweep_folder import (
    LOCK_FILE,
    SWEEP_FILE,
    CellStatus,
    SweepFolder,
    code_versions,
    count_states,
    varying,
)
from gramgn.records.table import runs
from gramgn.records.unwritten import UnwrittenFolder

__all__ = [
    "AVERAGE_COLUMNS",
    "DATA_COLUMNS",
    "ENDED",
    "ENTRIES",
    "INTEGER_COLUMNS",
    "LOCK_FILE",
    "LOG_FILE",
    "METRIC_COLUMNS",
    "METRIC_NAMES",
    "RESULT_COLUMNS",
    "RESUMABLE",
    "SETTING_COLUMNS",
    "SWEEP_FILE",
    "WAITING",
    "CellStatus",
    "Row",
    "RunFolder",
    "SweepFolder",
    "UnwrittenFolder",
    "Verdict",
    "at_end",
    "atomic_file",
    "baselines",
    "best_alphas",
    "checkpoint_identity",
    "code_versions",
    "count_states",
    "differing",
    "final_loss",
    "find_runs",
    "flat",
    "git_state",
    "identifying",
    "idle_epochs_note",
    "is_incidental",
    "loss_grid",
    "newest",
    "other_settings",
    "override_key",
    "path_override",
    "portable",
    "processor_name",
    "runs",
    "same_setting",
    "settings",
    "short_hash",
    "start_record",
    "time_to_target",
    "varying",
    "verdicts",
    "versions",
    "with_added",
    "with_seconds",
    "write_atomic",
    "write_results",
]
