"""Results files: finished runs as one CSV with a row a run and epoch, small enough to publish."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import METRIC_COLUMNS, Row, write_atomic

from ._columns import METRICS, RESULT_COLUMNS, RUN_COLUMNS, Column
from ._csv import read_lines
from ._load import SHOWN, Loaded, check, keep_newest
from ._run import OTHER_SETTINGS, Run
from ._theory import is_theory_file, read_theory


def write_results(loaded: Loaded, path: Path, *, report: Callable[[str], None] = say) -> int:
    """Write runs to a results file and return its number of rows.

    A run without an epoch, because it diverged in the first or did not finish, has one row without numbers.

    Args:
        loaded: Runs, finished and unfinished.
        path: The CSV file; replaced atomically. Its folder must exist.
        report: Called with one line for each run with a value that its column cannot hold; it is left out.

    Raises:
        InputError: The file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RESULT_COLUMNS)
    count = 0
    for run in sorted([*loaded.runs, *loaded.unfinished], key=_order):
        try:
            rows = _lines(run)
        except ValueError as error:
            report(f"left out {run.path}: {error}")
            continue
        writer.writerows(rows)
        count += len(rows)
    write_atomic(path, text.getvalue())
    return count


def read_results(paths: Sequence[Path]) -> Loaded:
    """Read results files and check them against the schema.

    Args:
        paths: CSV files of :func:`write_results`, and the theory's of :func:`write_theory`.

    Returns:
        The runs of all files; of runs that stand in several the newest.

    Raises:
        InputError: A file is missing, cut, or not of this schema; the message names file, line and column.
    """
    runs: list[Run] = []
    unfinished: list[Run] = []
    of_theory = [path for path in paths if is_theory_file(path)]
    for path in paths:
        for run in _runs_of(path) if path not in of_theory else ():
            (runs if run.state in SHOWN else unfinished).append(run)
    found = keep_newest(runs, unfinished, [], ", ".join(str(path) for path in paths))
    return replace(found, theory=read_theory(of_theory))


def _runs_of(path: Path) -> Iterator[Run]:
    lines = read_lines(path, "the results file", "export it again with scripts/export_results.py")
    names, _ = next(lines, ([], ""))
    _check_header(names, path)
    current: dict[str, Any] = {}
    rows: list[Row] = []
    ended: set[str] = set()
    for cells, place in lines:
        values = _parse(cells, place)
        if values["run"] != current.get("run"):
            if current:
                yield _run(current, rows, path)
            if values["run"] in ended:
                raise InputError(
                    f"{place}: the run {values['run']} began further up; a run's rows stand together"
                )
            ended.add(values["run"])
            current, rows = values, []
        elif changed := [
            column.name for column in RUN_COLUMNS if values[column.name] != current[column.name]
        ]:
            raise InputError(f"{place}: {', '.join(changed)} changes within the run {values['run']}")
        if values["epoch"] is not None:
            rows.append(
                dict.fromkeys(METRIC_COLUMNS) | {column.place: values[column.name] for column in METRICS}
            )
    if current:
        yield _run(current, rows, path)


def _check_header(names: list[str], path: Path) -> None:
    if names == list(RESULT_COLUMNS):
        return
    missing = [name for name in RESULT_COLUMNS if name not in names]
    unknown = [name for name in names if name not in RESULT_COLUMNS]
    faults = [f"it lacks {_few(missing)}"] if missing else []
    faults += [f"it has {_few(list(map(repr, unknown)))}, unknown here"] if unknown else []
    raise InputError(
        f"{path} is not a results file: {'; '.join(faults) or 'its columns are in another order, or doubled'}. "
        "The columns are described in outputs/results/README.md; scripts/export_results.py writes them."
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _parse(cells: list[str], place: str) -> dict[str, Any]:
    if len(cells) != len(RESULT_COLUMNS):
        raise InputError(f"{place}: {len(cells)} cells, expected {len(RESULT_COLUMNS)}")
    values = {}
    for column, cell in zip((*RUN_COLUMNS, *METRICS), cells, strict=True):
        try:
            values[column.name] = column.parse(cell)
        except ValueError as error:
            raise InputError(f"{place}, column {column.name}: {error}") from error
    if not values["run"]:
        raise InputError(f"{place}: the column run is empty")
    return values


def _run(values: Mapping[str, Any], rows: list[Row], path: Path) -> Run:
    record: dict[str, Any] = {}
    for column in RUN_COLUMNS:
        value = values[column.name]
        if column.name == "standardized":
            value = None if value is None else value == "true"
        if column.place and value is not None:
            *parents, leaf = column.place.split(".")
            part = record
            for parent in parents:
                part = part.setdefault(parent, {})
            part[leaf] = value
    record.setdefault("git", {})["dirty"] = values["git_diff"] is not None
    record["starts"] = [{"time_utc": record.pop("began", ""), "git": record["git"]}]
    record.setdefault(OTHER_SETTINGS, "")
    run = Run(str(values["run"]), record, rows)
    try:
        return check(run) if run.state in SHOWN else run
    except InputError as error:
        message = str(error).replace("its run.json", "it").replace("its metrics.csv", "it")
        raise InputError(f"{path}, run {run.path}: {message}") from error


def _lines(run: Run) -> list[list[str]]:
    """Return the cells of a run's rows.

    Raises:
        ValueError: A value is not one that its column can hold, as an optimizer of the user's may have.
    """
    values = [_format(_value(run, column), column) for column in RUN_COLUMNS]
    empty: Row = dict.fromkeys(METRIC_COLUMNS)
    metrics = [[_format(row[column.place], column) for column in METRICS] for row in run.rows or [empty]]
    return [[*values, *cells] for cells in metrics]


def _value(run: Run, column: Column) -> Any:
    special = {"run": run.path, "began": run.began, OTHER_SETTINGS: run.other_settings}
    if column.name in special:
        return special[column.name]
    value: Any = run.record
    for name in column.place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _format(value: Any, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        text = str(value).lower()
    else:
        text = repr(value) if isinstance(value, float) else str(value)[: column.digits]
    try:
        column.parse(text)
    except ValueError as error:
        raise ValueError(f"the column {column.name} cannot hold {text[:40]!r} ({error})") from error
    return text


def _order(run: Run) -> tuple[str, str, str]:
    return (run.experiment or "", run.sweep or "", run.path)


def summary_of(loaded: Loaded) -> str:
    """Return one line that says what a results file holds.

    Args:
        loaded: Its runs.
    """
    names = _counted(
        run.sweep or run.experiment or "other runs" for run in [*loaded.runs, *loaded.unfinished]
    )
    if loaded.theory and not loaded.runs:
        return f"the theory: {len(loaded.theory.runs)} runs, {len(loaded.theory.costs)} timed steps"
    left = f", {len(loaded.unfinished)} unfinished" if loaded.unfinished else ""
    return f"{len(loaded.runs)} runs{left}: " + ", ".join(
        f"{count} of {name}" for name, count in names.items()
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
