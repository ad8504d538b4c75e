"""Questions to the table of runs that have one answer everywhere: figures, claims, resolvers, dashboards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gramgn.records.columns import RUN_COLUMNS
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
        The run-level columns and `folder`, `code`, `error`, one row per run in the table's order, with `loss`: infinite
        if the run diverged (at this epoch or later) or its loss is not finite, missing (NaN) if it has not ended or
        has no row at that epoch.
    """
    import numpy as np

    wanted = table["epochs"] if epoch is None else epoch
    at_epoch = (table["epoch"] == wanted).fillna(False)
    losses = table[at_epoch].groupby(["folder", "run"], dropna=False)[column].last()
    names = [column.name for column in RUN_COLUMNS] + ["folder", "code", "error"]
    cells = table[names].drop_duplicates(["folder", "run"]).reset_index(drop=True)
    found = cells.merge(losses.rename("loss").reset_index(), on=["folder", "run"], how="left")
    has_row = cells.merge(table[at_epoch][["folder", "run"]].drop_duplicates(), how="left", indicator="row")[
        "row"
    ].eq("both")
    loss = found["loss"].where(np.isfinite(found["loss"]) | ~has_row, math.inf)
    loss = loss.where(found["state"] != "diverged", math.inf)
    return found.assign(loss=loss.where(found["state"].isin(ENDED)))


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
    keys = table.assign(setting=same_setting(table), sweep=table["sweep"].where(table["sweep"] != "seeds"))
    ended = keys["state"].isin(ENDED)
    same = ["setting", "seed", "scale", "experiment", "sweep", "dataset", "device"]
    order = keys[ended].sort_values(["began", "run"], na_position="first", kind="stable")
    last = order.groupby([*same, *DATA_COLUMNS[1:]], dropna=False)[["folder", "run"]].transform("last")
    run = order["run"].eq(last["run"]) & (order["folder"].eq(last["folder"]) | order["folder"].isna())
    kept = order.index[run]
    done = set(
        map(repr, keys.loc[kept, same].astype(object).where(lambda each: each.notna(), None).values.tolist())
    )
    open_ = keys[~ended]
    names = open_[same].astype(object).where(lambda each: each.notna(), None).values.tolist()
    still = [index for index, name in zip(open_.index, names, strict=True) if repr(name) not in done]
    return table.loc[sorted([*kept, *still])]
