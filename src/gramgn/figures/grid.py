"""The grid of figure 2c: training loss over lambda and alpha, and what became of cells without one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from gramgn.figures.curves import groups, heads
from gramgn.records import ENDED, WAITING, best_alphas, final_loss, same_setting

EPOCH = 10
"""The epoch of the paper's figure 2c."""
_STATES = {"failed": "failed", WAITING: "not run"}


@dataclass(frozen=True)
class GridCell:
    """One pair of lambda and alpha.

    Attributes:
        state: `"finite"`, `"diverged"`, `"failed"`, `"unfinished"` (stopped, killed or still running) or `"not run"`.
        loss: Training loss at the grid's epoch, median over seeds, a diverged seed counted as infinite; None unless
            finite.
        losses: Loss of each seed; infinite where it diverged.
    """

    state: str
    loss: float | None
    losses: Mapping[int, float]

    @property
    def num_diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(not math.isfinite(loss) for loss in self.losses.values())


@dataclass(frozen=True, eq=False)
class Grid:
    """Figure 2c as data.

    Attributes:
        title: Data set, whether it is synthetic, size, number of images, scale, network.
        epoch: The epoch that losses are taken from.
        rows: The rows of its runs, finished or not.
        cells: By lambda and alpha; a pair that nobody asked for is missing.
    """

    title: str
    epoch: int
    rows: pd.DataFrame
    cells: Mapping[tuple[float, float], GridCell]

    @property
    def convention(self) -> str:
        """Convention of alpha, e.g. `"mean"`."""
        return str(self.rows.damping_convention.iloc[0] or "sum")

    @property
    def lams(self) -> list[float]:
        """Lambdas, ascending."""
        return sorted({lam for lam, _ in self.cells})

    @property
    def alphas(self) -> list[float]:
        """Alphas, ascending."""
        return sorted({alpha for _, alpha in self.cells})

    def cell(self, lam: float, alpha: float) -> GridCell:
        """Return a cell; where there is no run its state is "not run"."""
        return self.cells.get((lam, alpha), GridCell("not run", None, {}))

    def column(self, lam: float) -> dict[float, GridCell]:
        """Return the cells of one lambda that were begun, by alpha."""
        cells = {alpha: self.cell(lam, alpha) for alpha in self.alphas}
        return {alpha: cell for alpha, cell in cells.items() if cell.state != "not run"}

    def best_alphas(self) -> dict[float, float]:
        """Return the best alpha of each lambda that has a finite cell; see `gramgn.records.best_alphas`."""
        found = best_alphas(self.rows, epoch=self.epoch).dropna()
        return dict(zip(found.index, found, strict=True))


def make_grid(rows: pd.DataFrame, title: str) -> Grid:
    """Sort runs into cells.

    Args:
        rows: Runs that differ only in lambda, alpha and seed; the first has ended.
        title: See `Grid`.
    """
    planned = rows.epochs.iloc[0]
    epoch = EPOCH if pd.isna(planned) else min(EPOCH, int(planned))
    # A run that is done without a row at this epoch has no loss there either.
    runs = final_loss(rows, epoch=epoch)
    ended = runs[runs.state.isin(ENDED)].fillna({"loss": math.inf})
    cells: dict[tuple[float, float], GridCell] = {}
    for found in groups(ended, "lam", "alpha"):
        losses = dict(zip(map(int, found.seed.fillna(0)), map(float, found.loss), strict=True))
        median = statistics.median(losses.values())
        finite = math.isfinite(median)
        cells[_place(found)] = GridCell(
            "finite" if finite else "diverged", median if finite else None, losses
        )
    for found in groups(runs[~runs.state.isin(ENDED)], "lam", "alpha"):
        # Of several seeds the furthest counts, and a failure before all.
        states = {_STATES.get(state, "unfinished") for state in found.state}
        state = min(states, key=["failed", "unfinished", "not run"].index)
        cells.setdefault(_place(found), GridCell(state, None, {}))
    return Grid(title, epoch, rows, dict(sorted(cells.items())))


def _place(rows: pd.DataFrame) -> tuple[float, float]:
    return float(rows.lam.iloc[0]), float(rows.alpha.iloc[0])


def grids(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs with a lambda and an alpha in groups that differ only in these, the seed and the threads.

    An unfinished run may not know its images yet: it belongs to every grid on its data set with its settings.

    Args:
        rows: Runs of `drawable`.
    """
    rows = rows[rows.lam.abs().lt(math.inf) & rows.alpha.abs().lt(math.inf)]
    rows = rows.assign(grid=same_setting(rows, "lam", "alpha", "threads"))
    has_ended = rows.state.isin(ENDED)
    found = []
    for group in groups(rows[has_ended], "images", "grid", "scale", "device"):
        first = group.iloc[0]
        others = rows[~has_ended & (rows.grid == first.grid) & (rows.scale == first.scale)]
        found.append(pd.concat([group, others[others.dataset == first.dataset]]))
    return found


def is_square(rows: pd.DataFrame) -> bool:
    """Return whether the runs that have ended have several lambdas and several alphas."""
    ended = heads(rows[rows.state.isin(ENDED)])
    return min(ended.lam.nunique(), ended.alpha.nunique()) >= 2
