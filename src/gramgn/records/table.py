"""The table of runs: everything that is known about any number of runs, one row per run and epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records.columns import (
    FLAG,
    INTEGER,
    LOCAL_COLUMNS,
    METRIC_NAMES,
    NUMBER,
    RUN_COLUMNS,
    SIZE,
    TABLE_COLUMNS,
    Column,
    fits,
    look_up,
)
from gramgn.records.identity import other_settings
from gramgn.records.metrics import Row
from gramgn.records.results import read_results
from gramgn.records.run_folder import RunFolder, find_runs
from gramgn.records.schema import WAITING
from gramgn.records.sweep_folder import SWEEP_FILE, SweepFolder, code_versions, failure_reason

if TYPE_CHECKING:
    import pandas as pd


def runs(
    *sources: str | os.PathLike[str], waiting: bool = False, report: Callable[[str], None] = say
) -> pd.DataFrame:
    """Return all runs of some folders and results CSVs as one table, one row per run and epoch.

    A run without an epoch (it diverged in the first one, failed, or has only begun) has one row whose `epoch` is
    missing. If an epoch occurs twice, the last row is used. Rows are ordered by run, then by epoch.

    Columns, with missing values as pandas marks them (`NaN`, `<NA>`):

    - One value per run: `experiment`, `sweep` (the choice `sweep=`; missing for ad-hoc sweeps), `run` (folder, with
      `/`, relative to the folder given, or to the common parent of several), `state` (`done`, `diverged`, `running`,
      `failed`, `interrupted`), `seed`, `dataset`, `kind` (`real` or `synthetic`), `unit`,
      `image_size` (pixels), `num_images`, `manifest`, `scale`, `standardized`, `model`, `depth`, `optimizer`, `lr`,
      `lam`, `alpha`, `damping_convention`, `alpha_sum`, `momentum`, `epochs`, `batch_size` (a number or `full`),
      `threads`, `device_kind`, `device`, `other_settings` (a digest, see `same_setting`), `began` (UTC), `git`,
      `git_diff`, `torch`, `kernels`, `schedule`, `augment`, `average_decay`; of runs of the theory also `n`, `d`, `M`,
      `activation`, `order`, `lambda_0`, `kernel_gap`, `rho` (see `gramgn.theory.Observer`).
    - One value per epoch: the columns of metrics.csv. `lr`, `lam`, `alpha`, `alpha_sum` and `momentum` of an epoch
      are named `epoch_lr`, `epoch_lam` and so on. A results CSV holds some of them only.
    - `folder` (absolute; missing for a run from a CSV), `code` (all versions of the code the run went through),
      `error` (why it failed, stopped or diverged) and `source` (the folder that `run` is relative to, or the CSV).
      `source` and `run` together identify a run.

    Example:
        >>> from gramgn.records import best_alphas, loss_grid, runs
        >>> table = runs("outputs")  # or runs("outputs/results/paper_laptop_synthetic.csv")
        >>> curves = table[table.experiment == "fig1/rsna_ggn_fixup"]
        >>> curves.groupby("epoch")[["train_s", "train_loss"]].median()
        >>> cells = table[table.sweep == "lambda_alpha"]
        >>> loss_grid(cells)  # lambda across, alpha down
        >>> best_alphas(cells)  # one per lambda

    Args:
        *sources: Folders, searched to any depth, and CSV files. A missing folder holds no runs.
        waiting: Add one row, in the state `waiting`, for each job that a sweep in these folders has not begun; its
            settings are copied from the sweep's first job, except overrides of lambda, alpha and seed.
        report: Called with one sentence for each run that is left out because a file is damaged. Default: to stderr.

    Raises:
        InputError: A CSV is missing or is not a results file.
    """
    import pandas as pd

    paths = list(dict.fromkeys(Path(source) for source in sources))
    tables = [read_results(path) for path in paths if path.suffix == ".csv"]
    folders = [path.absolute() for path in paths if path.suffix != ".csv"]
    if folders or not tables:
        tables.insert(0, _table(_found(folders, waiting, report)))
    columns = [column.name for column in TABLE_COLUMNS]
    filled = [table.reindex(columns=columns) for table in tables]
    joined = pd.concat(filled, ignore_index=True) if len(filled) > 1 else filled[0]
    # The copy joins columns of one type, so that pandas does not warn where many more are added.
    return joined.astype({column.name: _dtype(column) for column in TABLE_COLUMNS}).copy()


def _found(
    roots: list[Path], waiting: bool, report: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Yield the values of each run below some folders and its rows."""
    base = Path(os.path.commonpath(roots)) if roots else Path()
    folders = {run.path: run for root in roots for run in find_runs(root)}
    sweeps: dict[Path, dict[str, Any]] = {}
    for path in sorted(folders):
        name = path.name if path == base else path.relative_to(base).as_posix()
        try:
            values, rows = _read(folders[path], name)
            values["source"] = str(base)
        except InputError as error:
            report(f"left out: {error}")
            continue
        if waiting and (path.parent / SWEEP_FILE).is_file():
            sweeps.setdefault(path.parent, values)
        yield values, rows
    for folder, neighbour in sweeps.items():
        try:
            yield from _waiting(folder, neighbour, folders)
        except InputError as error:
            report(f"left out the jobs that have not begun: {error}")


def _read(folder: RunFolder, name: str) -> tuple[dict[str, Any], list[Row]]:
    record = folder.read_run()
    values = {column.name: _value(record, column) for column in RUN_COLUMNS if column.place}
    starts = record.get("starts") or [{}]
    values |= {
        "run": name,
        "other_settings": other_settings(record),
        "began": look_up(starts[0], "time_utc"),
        "folder": str(folder.path),
        "code": " then ".join(code_versions(record)),
        "error": failure_reason(record),
    }
    rows = {row["epoch"]: row for row in folder.read_metrics()}
    return values, [rows[epoch] for epoch in sorted(rows, key=lambda epoch: epoch or 0)]


def _value(record: Mapping[str, Any], column: Column) -> Any:
    value = look_up(record, column.place)
    if isinstance(value, str) and column.type == NUMBER and value in ("nan", "inf", "-inf"):
        return float(value)
    if not fits(value, column.type):
        # A user-defined optimizer may have a list of learning rates: `other_settings` distinguishes them.
        return None
    return value[: column.digits] if isinstance(value, str) else value


def _waiting(
    folder: Path, neighbour: Mapping[str, Any], begun: Mapping[Path, RunFolder]
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    keys = {"optimizer.lam": "lam", "optimizer.alpha": "alpha", "seed": "seed"}
    for cell in SweepFolder(folder).read()["cells"]:
        path = folder / cell["folder"]
        if path in begun:
            continue
        given = dict(str(word).split("=", 1) for word in cell.get("overrides") or () if "=" in str(word))
        own: dict[str, Any] = {}
        for key, name in keys.items():
            if key in given:
                try:
                    own[name] = int(given[key]) if name == "seed" else float(given[key])
                except ValueError:  # such as an interpolation
                    own[name] = None
        run = neighbour["run"].rpartition("/")[0]
        yield (
            {
                **neighbour,
                **own,
                "run": f"{run}/{path.name}" if run else path.name,
                "state": WAITING,
                "alpha_sum": None,
                "began": None,
                "folder": str(path),
                "code": None,
                "error": None,
            },
            [],
        )


def _table(found: Iterable[tuple[dict[str, Any], list[Row]]]) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, list[Any]] = {column.name: [] for column in TABLE_COLUMNS}
    run_names = [column.name for column in (*RUN_COLUMNS, *LOCAL_COLUMNS)]
    for values, rows in found:
        count = max(len(rows), 1)
        for name in run_names:
            columns[name] += [values[name]] * count
        for name, table_name in METRIC_NAMES.items():
            columns[table_name] += [row[name] for row in rows] or [None]
    return pd.DataFrame(
        {column.name: pd.Series(columns[column.name], dtype=_dtype(column)) for column in TABLE_COLUMNS}
    )


def _dtype(column: Column) -> str:
    """Return the type of a column in pandas."""
    return {INTEGER: "Int64", NUMBER: "float64", FLAG: "boolean", SIZE: "object"}.get(column.type, "str")
