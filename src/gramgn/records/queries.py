"""Questions to the table of runs that have one answer everywhere: figures, claims, resolvers, dashboards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gramgn.records.columns import LOCAL_COLUMNS, RUN_COLUMNS, RUN_KEY
from gramgn.records.identity import SETTING_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

ENDED = ("done", "diverged")
DATA_COLUMNS = ("dataset", "kind", "image_size", "manifest", "num_images")
"""Columns that are equal for runs on the same images at the same size."""


def final_loss(table: pd.DataFrame, *, column: str = "train_loss", epoch: int | None = None) -> pd.DataFrame:
    """Return one row per run with its loss at the end: the loss of a cell.

    Args:
        table: Rows of `runs`.
        column: A loss or an error.
        epoch: The epoch to take; None takes the last planned epoch of each run.

    Returns:
        The columns that have one value per run, in the table's order, and `loss`: infinite
        if the run diverged (at this epoch or later) or its loss is not finite, missing (NaN) if it has not ended or
        has no row at that epoch.
    """
    import numpy as np

    key = list(RUN_KEY)
    cells = table.drop_duplicates(key)[[each.name for each in (*RUN_COLUMNS, *LOCAL_COLUMNS)]]
    at_epoch = table[(table["epoch"] == (table["epochs"] if epoch is None else epoch)).fillna(False)]
    rows = at_epoch.drop_duplicates(key, keep="last")[[*key, column]].rename(columns={column: "loss"})
    found = cells.merge(rows, on=key, how="left", indicator="row")
    is_lost = (found["row"] == "both") & ~np.isfinite(found["loss"])
    loss = found["loss"].mask(is_lost | (found["state"] == "diverged"), math.inf)
    return found.drop(columns="row").assign(loss=loss.where(found["state"].isin(ENDED)))


def loss_grid(table: pd.DataFrame, *, column: str = "train_loss", epoch: int | None = None) -> pd.DataFrame:
    """Return the losses of a sweep over lambda and alpha, median over seeds: lambda across, alpha down.

    Args:
        table: Rows of `runs`, of one sweep.
        column: A loss or an error.
        epoch: See `final_loss`.

    Returns:
        Index `alpha` (descending), columns `lam` (ascending). A cell is infinite where the median seed diverged,
        and missing where no run has ended.
    """
    cells = final_loss(table, column=column, epoch=epoch).dropna(subset=["loss"])
    grid = cells.pivot_table("loss", "alpha", "lam", aggfunc="median")
    return grid.sort_index(ascending=False).sort_index(axis=1)


def best_alphas(
    table: pd.DataFrame, *, column: str = "train_loss", epoch: int | None = None
) -> pd.Series[float]:
    """Return the best alpha of each lambda: the least loss, median over seeds.

    An alpha with a seed that diverged is never the best; of equal losses the larger alpha, the more cautious step, is.

    Args:
        table: Rows of `runs`, of one sweep.
        column: A loss or an error.
        epoch: See `final_loss`.

    Returns:
        Alpha in the configured convention, by `lam` (ascending); NaN for a lambda without a finite alpha.
    """
    cells = final_loss(table, column=column, epoch=epoch).dropna(subset=["loss"])
    losses = cells.groupby(["lam", "alpha"])["loss"].agg(["median", "max"]).reset_index()
    finite = losses[losses["max"] < math.inf].sort_values(
        ["lam", "median", "alpha"], ascending=[True, True, False]
    )
    best = finite.drop_duplicates("lam").set_index("lam")["alpha"]
    return best.reindex(sorted(cells["lam"].dropna().unique()))


def same_setting(table: pd.DataFrame, *without: str) -> pd.Series[str]:
    """Return a text per row that is equal for runs of the same setting, whatever their seeds.

    Group by it to join the seeds of one curve: `table.groupby(same_setting(table))`. The data is not part of it (see
    `DATA_COLUMNS`); the number of threads is on a CPU, where it changes the measured times.

    Args:
        table: Rows of `runs`.
        *without: Columns that may differ, e.g. `"lam"`, `"alpha"`.
    """
    columns = [
        name for name in ("optimizer", "model", *SETTING_COLUMNS, "other_settings") if name not in without
    ]
    values = table[columns].copy()
    if "threads" in columns:
        values["threads"] = values["threads"].where(table["device_kind"] == "cpu")
    keys = values.astype(object).where(values.notna(), None)
    # Few settings, many rows: each distinct one is written once.
    groups = keys.groupby(columns, dropna=False, sort=False).ngroup()
    texts = {
        number: repr(tuple(row)) for number, row in zip(groups, keys.itertuples(index=False), strict=True)
    }
    return groups.map(texts).astype("str")


def newest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table without the runs that were repeated later with the same settings, data and seed.

    A run that did not end is left out if one of the same setting and seed has ended. Runs of `sweep=seeds` are
    repetitions of the same runs made one by one.

    Args:
        table: Rows of `runs`.
    """
    jobs = table.assign(setting=same_setting(table), sweep=table["sweep"].where(table["sweep"] != "seeds"))
    jobs = jobs.drop_duplicates(list(RUN_KEY))
    same = ["setting", "seed", "scale", "experiment", "sweep", "dataset", "device"]
    ended = jobs[jobs["state"].isin(ENDED)].sort_values(["began", "run"], na_position="first", kind="stable")
    ended = ended.drop_duplicates([*same, *DATA_COLUMNS], keep="last")
    others = jobs[~jobs["state"].isin(ENDED)]
    replaced = others[same].merge(ended[same].drop_duplicates(), how="left", indicator="in")["in"] == "both"
    kept = {*_keys(ended), *_keys(others[~replaced.to_numpy()])}
    return table[_keys(table).isin(kept)]


def _keys(table: pd.DataFrame) -> pd.Series[str]:
    return table["source"].str.cat(table["run"], sep="\n")
