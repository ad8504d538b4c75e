"""The tables that the theory's figures and statements are made from: runs of the two-layer network, costs of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from gramgn.errors import InputError
from gramgn.theory.rates import FLOOR, contraction, fitted_exponent, last_order, quadratic_constants

STUDIES_OF_RUNS = ("quadratic", "cyclic", "methods")
COST_FILE = "theory_cost.csv"
_DATA = ["dataset", "kind", "activation", "n", "d"]
_LINE = ["study", "method", "order", "M", "b", "lam", "alpha"]
"""What the seeds of one line of a figure have in common."""
_MEASURED = [
    *("seed", "epochs", "kernel_gap", "rho", "epoch", "residual", "drift_J", "drift_G"),
    *("convergence_order", "constant", "c", "c_A"),
]
_COSTS = [
    *(
        "network",
        "pixels",
        "b",
        "m",
        "round",
        "step_s",
        "forward_s",
        "backward_s",
        "blocks_s",
        "gram_s",
        "solve_s",
    ),
    *("update_s", "sgd_s", "forward_ops", "gram_ops", "solve_ops", "device"),
]


@dataclass(frozen=True, eq=False)
class Theory:
    """What the studies measured.

    Attributes:
        runs: A row per run, of `theory_runs`.
        costs: A row per shape and round, of `read_costs`.
    """

    runs: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=[*_LINE, *_DATA, *_MEASURED]))
    costs: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_COSTS))

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(len(self.runs) or len(self.costs))

    def study(self, name: str) -> pd.DataFrame:
        """Return the runs of a study."""
        return self.runs[self.runs.study == name]


def is_of_study(table: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows of the table of runs belong to a study: those of the sweeps `theory_<study>`."""
    return table.sweep.isin([f"theory_{study}" for study in STUDIES_OF_RUNS])


def theory_runs(table: pd.DataFrame, report: Callable[[str], None]) -> pd.DataFrame:
    """Return the finished runs of the studies, of repeated ones the newest.

    All runs of a study must be on the same data with the same activation, and the seeds of one line be measured at the
    same epochs: where they are not, those like the newest are taken.

    Args:
        table: Of `gramgn.records.runs`.
        report: Called with one line for what is left out.

    Returns:
        A row per run: its settings (`alpha` in the sum convention; `lam` and `alpha` NaN for gradient descent); tuples
        `epoch` and `residual` |f - y|; the drifts and |G_0 - K|; `rho`, the predicted contraction per epoch;
        `convergence_order` of the last step above rounding; `constant` |f_2 - y| / |f_1 - y|^2, which is C / sqrt M of
        Theorem 1; `c` and `c_A`, the contractions per epoch over the second half of the epochs of the network and of
        its linearisation. What cannot be computed is NaN.
    """
    rows = table[is_of_study(table) & (table.state == "done") & table.residual.notna()]
    rows = rows.sort_values(["began", "epoch"], na_position="first")
    found = [_run(own) for _, own in rows.groupby(["source", "run"], sort=False)]
    runs = pd.DataFrame(found, columns=[*_LINE, *_DATA, *_MEASURED])
    runs = runs.drop_duplicates([*_LINE, *_DATA, "seed"], keep="last")
    kept = _like_newest(_like_newest(runs, ["study"], _DATA), _LINE, ["epoch"])
    if others := len(runs) - len(kept):
        report(
            f"left out {others} runs of the theory's studies: on other data, with another activation, or measured at "
            "other epochs than the newest"
        )
    return kept


def _like_newest(runs: pd.DataFrame, by: list[str], columns: list[str]) -> pd.DataFrame:
    """Return the runs that agree in some columns with the last run of their group."""
    last = runs.groupby(by, dropna=False)[columns].transform("last")
    return runs[(runs[columns] == last).all(axis=1)]


def _run(rows: pd.DataFrame) -> dict[str, Any]:
    first, last = rows.iloc[0], rows.iloc[-1]
    epoch, residual = tuple(rows.epoch.astype(int)), tuple(rows.residual.astype(float))
    above = next((t for t, value in enumerate(residual) if not value > FLOOR), len(residual))
    linear = [*rows.linear_residual.fillna(0.0)][:above]
    return {
        "study": first.sweep.removeprefix("theory_"),
        "method": first.optimizer,
        "order": first.order,
        "M": int(first.M),
        "b": int(first.n if first.batch_size == "full" else first.batch_size),
        "lam": float(first.lam),
        "alpha": float(first.alpha_sum),
        **{name: first[name] for name in ("dataset", "kind", "activation")},
        "n": int(first.n),
        "d": int(first.d),
        "seed": int(first.seed),
        "epochs": int(first.epochs),
        "kernel_gap": float(first.kernel_gap),
        "rho": float(first.rho),
        "epoch": epoch,
        "residual": residual,
        "drift_J": float(last.drift_J),
        "drift_G": float(last.drift_G),
        "convergence_order": _or_nan(lambda: last_order(residual)),
        "constant": _or_nan(lambda: quadratic_constants(residual[:3], floor=0.0)[1]),
        "c": _or_nan(lambda: contraction(residual) ** (1 / (epoch[1] - epoch[0]))),
        "c_A": _or_nan(lambda: contraction(linear) ** (1 / (epoch[1] - epoch[0]))),
    }


def _or_nan(rate: Callable[[], float]) -> float:
    try:
        return rate()
    except (ValueError, IndexError, OverflowError):
        return math.nan


def is_cost_file(path: Path) -> bool:
    """Return whether a CSV is one of `benchmarks/cost.py`, by its first line."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(1000).startswith("network,pixels,b,m,round,")
    except (OSError, UnicodeDecodeError):
        return False


def read_costs(path: Path) -> pd.DataFrame:
    """Read a file of `benchmarks/cost.py`: what a step cost per round (in seconds), and its multiply-adds.

    Raises:
        InputError: The file is missing, cut or lacks a column.
    """
    try:
        table = pd.read_csv(path)[_COSTS]
        if table.isna().any(axis=None):
            raise ValueError("a cell is empty")
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{path} is not a file of costs ({error}); measure again with python benchmarks/cost.py"
        ) from error
    return table


def with_parts(costs: pd.DataFrame) -> pd.DataFrame:
    """Return costs with the paper's parts of a step: (A), forward and per-sample backward, and (B), Gram and solve."""
    return costs.assign(
        part_A_s=costs.forward_s + costs.backward_s + costs.blocks_s, part_B_s=costs.gram_s + costs.solve_s
    )


def cost_axes(costs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows over b of the network that most batch sizes were timed for, and those over m at one b.

    Both on images of the size that most rows have.
    """
    if costs.empty:
        return costs, costs
    rows = costs[costs.pixels == statistics.mode(costs.pixels)]
    network = rows.groupby("network", sort=False).b.nunique().idxmax()
    b = rows.groupby("b", sort=False).network.nunique().idxmax()
    return rows[rows.network == network], rows[rows.b == b]


def slopes(rows: pd.DataFrame, value: str, size: str, by: str = "seed") -> dict[str, float]:
    """Return for each seed or round the slope of log(value) against log(size); none for fewer than two sizes.

    A value that is 0 or missing has no logarithm and takes no part.
    """
    rows = rows[rows[value].notna() & (rows[value] != 0)]
    return {
        str(key): fitted_exponent(own[size].tolist(), own[value].tolist())
        for key, own in rows.groupby(by)
        if own[size].nunique() > 1
    }


def values_by(rows: pd.DataFrame, values: pd.Series, by: str = "seed") -> dict[str, float]:
    """Return a number for each seed or round, without those that have none."""
    known = values.notna()
    return dict(zip(rows[by][known].astype(str), values[known], strict=True))


def median(values: Sequence[float] | pd.Series) -> float:
    """Return the median of numbers."""
    return float(statistics.median(values))
