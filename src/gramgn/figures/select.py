"""Which runs of a table are drawn: those that are whole, and of repetitions the newest."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from gramgn.figures.curves import heads
from gramgn.records import DATA_COLUMNS, ENDED, METRIC_NAMES, WAITING, newest, same_setting

_TEXTS = (
    *("experiment", "dataset", "kind", "unit", "scale", "model", "optimizer", "damping_convention"),
    *("device_kind", "device", "other_settings", "began", "folder", "code", "error"),
)


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
    if (rows.train_s.dropna().diff() < 0).any():
        return "its training time goes backwards"
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
