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
        num_diverged: Number of seeds that diverged.
    """

    state: str
    loss: float | None = None
    num_diverged: int = 0


@dataclass(frozen=True, eq=False)
class Grid:
    """Figure 2c as data.

    Attributes:
        title: Data set, whether it is synthetic, size, number of images, scale, network.
        epoch: The epoch that losses are taken from.
        rows: The rows of its runs, finished or not.
        losses: `lam`, `alpha`, `seed` and `loss` of each run that has ended; the loss is infinite where it diverged.
        cells: By lambda and alpha; pairs that were not requested are missing.
    """

    title: str
    epoch: int
    rows: pd.DataFrame
    losses: pd.DataFrame
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
        return self.cells.get((lam, alpha), GridCell("not run"))

    def best_alphas(self) -> dict[float, float]:
        """Return the best alpha of each lambda that has a finite cell; see `gramgn.records.best_alphas`."""
        found = best_alphas(self.rows, epoch=self.epoch).dropna()
        return dict(zip(found.index, found, strict=True))


def make_grid(rows: pd.DataFrame, title: str) -> Grid:
    """Sort runs that differ only in lambda, alpha and seed into cells; the first has ended."""
    planned = rows.epochs.iloc[0]
    epoch = EPOCH if pd.isna(planned) else min(EPOCH, int(planned))
    # A run that is done but has no row at this epoch counts as infinite.
    runs = final_loss(rows, epoch=epoch).astype({"lam": float, "alpha": float})
    losses = runs.loc[runs.state.isin(ENDED), ["lam", "alpha", "seed", "loss"]]
    losses = losses.fillna({"loss": math.inf, "seed": 0}).astype({"loss": float, "seed": int})
    cells: dict[tuple[float, float], GridCell] = {}
    for own in groups(losses, "lam", "alpha"):
        loss = own.loss
        num_diverged, median = int((loss == math.inf).sum()), float(statistics.median(loss))
        finite = median < math.inf
        state = "finite" if finite else "diverged"
        cells[_place(own)] = GridCell(state, median if finite else None, num_diverged)
    for own in groups(runs[~runs.state.isin(ENDED)], "lam", "alpha"):
        # Of several seeds the one that got furthest counts, but a failure comes first.
        found = {_STATES.get(state, "unfinished") for state in own.state}
        cells.setdefault(_place(own), GridCell(min(found, key=["failed", "unfinished", "not run"].index)))
    return Grid(title, epoch, rows, losses, dict(sorted(cells.items())))


def _place(rows: pd.DataFrame) -> tuple[float, float]:
    return rows.lam.iloc[0], rows.alpha.iloc[0]


def grids(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs with a lambda and an alpha in groups that differ only in these, the seed and the threads.

    An unfinished run may not know its images yet: it belongs to every grid on its data set with its settings.
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
