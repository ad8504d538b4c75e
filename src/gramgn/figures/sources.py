"""From folders and files to the runs that are drawn: those that are whole, and of repetitions the newest."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gramgn.errors import InputError, counted
from gramgn.figures.curves import heads
from gramgn.figures.panels import figure_sets
from gramgn.figures.theory import COST_FILE, Theory, is_cost_file, is_of_study, read_costs, theory_runs
from gramgn.progress import say
from gramgn.records import DATA_COLUMNS, ENDED, METRIC_NAMES, WAITING, newest, runs, same_setting

_TEXTS = (
    *("experiment", "dataset", "kind", "unit", "scale", "model", "optimizer", "damping_convention"),
    *("device_kind", "device", "other_settings", "began", "folder", "code", "error"),
)


@dataclass(frozen=True, eq=False)
class Shown:
    """What figures, claims and the report are made from.

    Attributes:
        rows: Runs, of `drawable`.
        theory: What the theory's studies measured.
    """

    rows: pd.DataFrame
    theory: Theory

    @property
    def finished(self) -> pd.DataFrame:
        """The rows of the runs that are done or diverged."""
        return self.rows[self.rows.state.isin(ENDED)]

    def __bool__(self) -> bool:
        """Return whether there is anything to draw."""
        return bool(len(self.finished) or self.theory)


def read_runs(
    *sources: str | os.PathLike[str], paper_only: bool = False, report: Callable[[str], None] = say
) -> Shown:
    """Read the runs that can be drawn, and report those that cannot.

    Args:
        *sources: Folders, searched to any depth, results CSVs, and CSVs of `benchmarks/cost.py`, which are also
            found as `theory/theory_cost.csv` below a folder.
        paper_only: Whether to leave out the runs that are in no panel of the paper.
        report: Called with one line for each run that is left out.

    Raises:
        InputError: A file is missing or damaged, or there is nothing to draw; the message says how to make a run.
    """
    _, shown = read_table(*sources, report=report)
    if not shown:
        places = ", ".join(str(Path(source).absolute()) for source in sources)
        raise InputError(
            f"no finished run in {places}. Make some with `make demo` (a few minutes), or one with "
            "`python train.py trainer=laptop`."
        )
    return _of_paper(shown, report) if paper_only else shown


def read_table(
    *sources: str | os.PathLike[str], report: Callable[[str], None] = say
) -> tuple[pd.DataFrame, Shown]:
    """Return the table of all runs, whatever their state, and what can be drawn of it, possibly nothing.

    Args:
        *sources: See `read_runs`.
        report: See `read_runs`.

    Raises:
        InputError: A file is missing or damaged.
    """
    paths = [Path(source) for source in sources]
    costs = [path for path in paths if path.suffix == ".csv" and is_cost_file(path)]
    costs += [file for path in paths if (file := path / "theory" / COST_FILE).is_file()]
    table = runs(*(path for path in paths if path not in costs), waiting=True, report=report)
    measured = [read_costs(path) for path in dict.fromkeys(costs)]
    theory = Theory(
        theory_runs(table, report), *([pd.concat(measured, ignore_index=True)] if measured else [])
    )
    others = table[~is_of_study(table)]
    return table, Shown(drawable(others, report), theory)


def _of_paper(shown: Shown, report: Callable[[str], None]) -> Shown:
    """Return what belongs to the paper and report the number of other runs."""
    _, rest = figure_sets(shown.rows)
    others = rest.run[rest.state.isin(ENDED)].unique()
    if len(others):
        text = (
            f"{counted(len(others), 'finished run')} (such as {others[0]}) in no figure of the paper; name folders "
            "to draw them, e.g. make figures RUNS=outputs/runs"
        )
        if len(others) == shown.finished.run.nunique() and not shown.theory:
            raise InputError(text)
        report(text)
    return Shown(shown.rows[~shown.rows.run.isin(rest.run)], shown.theory)


def drawable(table: pd.DataFrame, report: Callable[[str], None]) -> pd.DataFrame:
    """Return the runs that can be drawn, and those without a result, which a grid marks.

    A run is drawn if it is done or diverged and its metrics are whole. Of several runs with the same experiment,
    settings, seed, images and device the newest is drawn. Runs that failed, were stopped or are still running are
    kept as one row each without metrics, unless a finished run has replaced them; so are jobs that have not begun.

    Returns:
        The rows, ordered by run and epoch, with two more columns: `images` and `setting` are equal for runs on the
        same images and for runs with the same settings.
    """
    table = _prepared(table)
    faults = {str(run): fault for run, rows in table.groupby("run") if (fault := _fault(rows))}
    whole = table[~table.run.isin(list(faults))]
    kept = newest(whole)
    repeated = whole[whole.state.isin(ENDED) & ~whole.run.isin(kept.run)]
    is_shown = kept.state.isin(ENDED)
    open_runs = heads(table[~table.state.isin([*ENDED, WAITING])])
    reasons = faults | dict.fromkeys(repeated.run, "repeated later with the same settings and seed")
    reasons |= dict(zip(open_runs.run, map(_why_open, open_runs.state, open_runs.error), strict=True))
    for run, reason in sorted(reasons.items()):
        report(f"left out {run}: {reason}")
    marked = heads(kept[~is_shown]).drop(columns=list(METRIC_NAMES.values()))
    return pd.concat([kept[is_shown], marked], ignore_index=True).fillna({"sweep": ""})


def _prepared(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table in order, with empty texts where a text is missing, and with the keys of groups."""
    table = table.assign(**{name: table[name].fillna("") for name in _TEXTS})
    # Two files may hold the same run, or two runs of one name.
    table = table.drop_duplicates(["run", "began", "epoch"], keep="last")
    several = table.groupby("run").began.transform("nunique") > 1
    table = table.assign(run=table.run.where(~several, table.run + " of " + table.began))
    table = table.sort_values(["run", "epoch"], ignore_index=True)
    images = table.groupby(list(DATA_COLUMNS), dropna=False).ngroup()
    standardized = table.standardized.fillna(True)  # the default
    return table.assign(images=images, setting=same_setting(table), standardized=standardized)


def _fault(rows: pd.DataFrame) -> str | None:
    """Return why a run that has ended cannot be drawn, or None."""
    first = rows.iloc[0]
    if first.state not in ENDED:
        return None
    if first.kind not in ("real", "synthetic"):
        return "its record does not say whether its data is real or synthetic"
    rows = rows[rows.epoch.notna()]
    times = rows.train_s.dropna()
    if (times.diff() < 0).any():
        return "its training time goes backwards"
    if not times.between(0, sys.float_info.max).all():
        return "a training time is negative or infinite"
    if first.state == "done":
        if not len(rows):
            return "its metrics have no epoch"
        if pd.notna(first.epochs) and rows.epoch.iloc[-1] != first.epochs:
            return f"its metrics end at epoch {rows.epoch.iloc[-1]} of {first.epochs}"
    return None


def _why_open(state: str, error: str) -> str:
    if state == "running":
        return "not finished (still running, or killed)"
    return state + (f" ({error.splitlines()[0]})" if error else "")
