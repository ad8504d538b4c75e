"""From folders and files to the runs that are drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gramgn.errors import InputError, counted
from gramgn.figures.panels import figure_sets
from gramgn.figures.select import drawable
from gramgn.figures.theory import COST_FILE, Theory, is_cost_file, is_of_study, read_costs, theory_runs
from gramgn.progress import say
from gramgn.records import ENDED, runs


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
    """Return the table of all runs, whatever became of them, and what can be drawn of it, be it nothing.

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
