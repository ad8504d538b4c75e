"""Runs of several lengths, each at its end, relative to the strongest baseline: the rules of `docs/protocol.md`.

A method is an optimizer on a network, e.g. `"sgd on resnet_bn"`; a budget is a number of epochs. All runs of a method
with one budget have the same settings but the seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gramgn.records.queries import final_loss, same_setting

if TYPE_CHECKING:
    import pandas as pd

EVEN_BELOW = 0.05
"""Share of the test error; a smaller difference at the end counts as even."""


@dataclass(frozen=True)
class Verdict:
    """A method relative to the strongest baseline at its best budget.

    Attributes:
        question: `"per epoch"`, `"per second"` or `"at the end"`.
        answer: `"ahead"`, `"even"` or `"behind"`; why there is none if `differences` is empty.
        epochs: Budget of the method.
        baseline_epochs: Budget of the strongest baseline.
        differences: Method minus baseline by seed: validation loss; at the end, test error in the unit of the data.
        ratio: Method's median over the baseline's.
    """

    question: str
    answer: str
    epochs: int = 0
    baseline_epochs: int = 0
    differences: Mapping[int, float] | None = None
    ratio: float = math.nan


def with_seconds(table: pd.DataFrame, clock: pd.DataFrame) -> pd.DataFrame:
    """Return the table with `train_s` from other runs of the same settings, which had the machine to themselves.

    Args:
        table: Rows of `runs`.
        clock: Rows of `runs`, the first two epochs of each setting, with one seed or several.

    Returns:
        The table; the seconds of E epochs are those of the first epoch and E - 1 times those of the second one, NaN
        where `clock` has no finished run of the same settings, data set and scale. Where it has n of them, the run
        with seed s takes those of number s mod n: with n = 3, median and range over three or five seeds are those of
        the clock runs.
    """
    measured: dict[tuple[object, ...], dict[str, list[float]]] = {}
    timed = clock[clock["state"] == "done"].sort_values(["seed", "epoch"])
    for place, run, seconds in zip(_places(timed), timed["run"], timed["train_s"], strict=True):
        measured.setdefault(place, {}).setdefault(run, []).append(seconds)
    found = [
        (runs := list(measured.get(place, {"": [math.nan] * 2}).values()))[int(seed) % len(runs)]
        for place, seed in zip(_places(table), table["seed"], strict=True)
    ]
    later = table["epoch"].astype("float64") - 1
    return table.assign(
        train_s=[first for first, _ in found] + later * [both - first for first, both in found]
    )


def at_end(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per run with its values after its last epoch.

    Args:
        table: Rows of `runs`, on one data set and at one scale.

    Returns:
        The columns that have one value per run; `method`; `train_loss`, `val_loss`, `val_mae`, `test_loss` and
        `test_mae` as `final_loss` defines them; `train_s` (seconds), NaN where it is not known.
    """
    ends = final_loss(table, column="train_s").rename(columns={"loss": "train_s"})
    ends["train_s"] = ends["train_s"].where(ends["train_s"] < math.inf)
    for name in ("train_loss", "val_loss", "val_mae", "test_loss", "test_mae"):
        ends[name] = final_loss(table, column=name)["loss"]
    return ends.assign(method=ends["optimizer"] + " on " + ends["model"])


def baselines(ends: pd.DataFrame, *, ours: Collection[str]) -> list[tuple[str, int]]:
    """Return the baselines, the strongest first, each with its best budget: by validation loss, median over seeds.

    Args:
        ends: What `at_end` returned.
        ours: The methods that are no baselines.
    """
    losses = ends[~ends["method"].isin(ours)].groupby(["method", "epochs"])["val_loss"].median()
    return list(
        losses.sort_values(kind="stable")
        .reset_index()
        .drop_duplicates("method")[["method", "epochs"]]
        .itertuples(index=False, name=None)
    )


def time_to_target(ends: pd.DataFrame, *, ours: Collection[str], column: str = "val_loss") -> pd.DataFrame:
    """Return, per method, the shortest budget at whose end it is at the loss of the strongest baseline or below.

    The target is the strongest baseline's median loss at its best budget.

    Args:
        ends: What `at_end` returned.
        ours: The methods that are no baselines.
        column: The loss to reach, `"val_loss"` or `"train_loss"`.

    Returns:
        Index `method`; columns `epochs`, `train_s` (median, seconds) and their ratios to the strongest baseline's own,
        `epochs_ratio` and `train_s_ratio`; NaN where the target is not reached. `attrs["target"]` is the target.
    """
    medians = ends.groupby(["method", "epochs"])[[column, "train_s"]].median()
    strongest, budget = baselines(ends, ours=ours)[0]
    target = medians[column].loc[[(strongest, budget)]].item()
    reached = medians[medians[column] <= target].reset_index().drop_duplicates("method").set_index("method")
    found = reached[["epochs", "train_s"]].astype("float64").reindex(ends["method"].unique())
    found = found.join((found / found.loc[strongest]).add_suffix("_ratio")).rename_axis("method")
    found.attrs["target"] = target
    return found


def verdicts(ends: pd.DataFrame, method: str, *, ours: Collection[str]) -> list[Verdict]:
    """Return whether a method is ahead of the strongest baseline per epoch, per second and at the end.

    Per epoch the method has at most a third of the baseline's epochs, per second at most half of its seconds; the
    longest budget that fits counts. At the end both have their best budgets by validation loss.

    Args:
        ends: What `at_end` returned.
        method: One of ours.
        ours: The methods that are no baselines.
    """
    strongest, budget = baselines(ends, ours=ours)[0]
    theirs = ends[(ends["method"] == strongest) & (ends["epochs"] == budget)]
    own = ends[ends["method"] == method]
    medians = own.groupby("epochs")[["val_loss", "train_s"]].median()
    short = medians.index[medians.index <= budget / 3]
    fast = medians.index[medians["train_s"] <= theirs["train_s"].median() / 2]
    is_timed = medians["train_s"].notna().any() and theirs["train_s"].notna().any()
    late = (
        "none of its budgets is at most half of the seconds" if is_timed else "its seconds are not measured"
    )
    cases = (
        ("per epoch", "val_loss", short, "none of its budgets is at most a third of the epochs"),
        ("per second", "val_loss", fast, late),
        ("at the end", "test_mae", [medians["val_loss"].idxmin()], ""),
    )
    return [
        _verdict(question, own[own["epochs"] == max(fitting)], theirs, column)
        if len(fitting)
        else Verdict(question, reason)
        for question, column, fitting, reason in cases
    ]


def _verdict(question: str, own: pd.DataFrame, theirs: pd.DataFrame, column: str) -> Verdict:
    values, others = (rows.set_index("seed")[column] for rows in (own, theirs))
    differences = (values - others).dropna()
    margin = EVEN_BELOW * others.median() if question == "at the end" else 0.0
    answer = "even"
    if len(differences) and abs(differences.median()) >= margin:
        answer = "ahead" if (differences < 0).all() else "behind" if (differences > 0).all() else "even"
    budget, their_budget = (int(rows["epochs"].iloc[0]) for rows in (own, theirs))
    by_seed = dict(zip(differences.index.astype(int), differences, strict=True))
    ratio = float(values.median() / others.median())
    return Verdict(question, answer, budget, their_budget, by_seed, ratio)


def _places(table: pd.DataFrame) -> list[tuple[object, ...]]:
    """Return what must be equal for runs that take the same time, for each row."""
    return list(zip(table["dataset"], table["scale"], same_setting(table, "epochs"), strict=True))
