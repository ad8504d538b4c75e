"""The grid of figure 2c: training loss over lambda and alpha, and what became of cells without one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._run import Run

LAM, ALPHA = "optimizer.lam", "optimizer.alpha"
EPOCH = 10  # the paper's
WAITING = "waiting"
_STATES = {"failed": "failed", WAITING: "not run"}


@dataclass(frozen=True)
class Cell:
    """One pair of lambda and alpha.

    Attributes:
        state: ``"finite"``, ``"diverged"``, ``"failed"``, ``"unfinished"`` (stopped, killed or still running) or
            ``"not run"``.
        loss: Training loss at the grid's epoch, median over seeds, a diverged seed counted as infinite; ``None``
            unless finite.
        losses: That of each seed, by seed; infinite where it diverged.
    """

    state: str
    loss: float | None
    losses: Mapping[str, float]

    @property
    def num_diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(not math.isfinite(loss) for loss in self.losses.values())


@dataclass(frozen=True)
class Grid:
    """Figure 2c as data.

    Attributes:
        title: Data set, whether it is synthetic, size, scale, seeds.
        device: Name of the device.
        unit: Unit of the targets.
        standardised: Whether a loss of 1 means predicting the mean.
        convention: Convention of alpha, e.g. ``"mean"``.
        epoch: The epoch that losses are of.
        lams: Lambdas, ascending.
        alphas: Alphas, ascending.
        cells: By lambda and alpha; a pair that nobody asked for is missing.
        runs: The finished runs behind it.
    """

    title: str
    device: str
    unit: str
    standardised: bool
    convention: str
    epoch: int
    lams: tuple[float, ...]
    alphas: tuple[float, ...]
    cells: Mapping[tuple[float, float], Cell]
    runs: tuple[Run, ...]

    def cell(self, lam: float, alpha: float) -> Cell:
        """Return a cell, one that says "not run" where there is no run."""
        return self.cells.get((lam, alpha), Cell("not run", None, {}))

    def column(self, lam: float) -> dict[float, Cell]:
        """Return the cells of one lambda that were begun, by alpha."""
        cells = {alpha: self.cell(lam, alpha) for alpha in self.alphas}
        return {alpha: cell for alpha, cell in cells.items() if cell.state != "not run"}

    def best_alpha(self, lam: float) -> float | None:
        """Return the alpha of the least loss for a lambda; ``None`` if no cell is finite.

        An alpha with a seed that diverged is never the best; of equals the larger alpha is.
        """
        found = {
            alpha: cell.loss
            for alpha, cell in self.column(lam).items()
            if cell.loss is not None and not cell.num_diverged
        }
        return min(found, key=lambda alpha: (found[alpha], -alpha)) if found else None

    def table(self) -> list[dict[str, Any]]:
        """Return one row a lambda, alpha and seed: ``lam``, ``alpha``, ``seed``, ``train_loss``, ``status``.

        ``train_loss`` is ``None`` and ``seed`` may be ``None`` where the status is not ``"finite"``.
        """
        rows: list[dict[str, Any]] = []
        for (lam, alpha), cell in sorted(self.cells.items()):
            for seed, loss in sorted(cell.losses.items()):
                finite = math.isfinite(loss)
                status = "finite" if finite else "diverged"
                rows.append(_row(lam, alpha, seed, loss if finite else None, status))
            if not cell.losses:
                rows.append(_row(lam, alpha, None, None, cell.state))
        return rows


def make_grid(runs: Sequence[Run], unfinished: Iterable[Run], **texts: Any) -> Grid:
    """Sort the runs of one sweep into cells.

    Args:
        runs: Finished runs that differ in lambda, alpha and seed only; at least one.
        unfinished: Runs of the same sweep that did not finish, or have not begun.
        **texts: ``title``, ``device``, ``unit``, ``standardised`` of the grid.
    """
    first = runs[0]
    epoch = min(EPOCH, int(first.own_settings["trainer.epochs"] or EPOCH))
    losses: dict[tuple[float, float], dict[str, float]] = {}
    for run in runs:
        losses.setdefault(place(run), {})[run.seed] = _loss(run, epoch)
    cells = {pair: _cell(found) for pair, found in losses.items()}
    # Of several seeds the furthest has the last word, and a failure before all.
    for run in sorted(unfinished, key=lambda run: (run.state == "failed", run.state != WAITING)):
        if place(run) not in losses:
            cells[place(run)] = Cell(_STATES.get(run.state, "unfinished"), None, {})
    return Grid(
        convention=str(first.own_settings["optimizer.damping_convention"] or "sum"),
        epoch=epoch,
        lams=tuple(sorted({lam for lam, _ in cells})),
        alphas=tuple(sorted({alpha for _, alpha in cells})),
        cells=cells,
        runs=tuple(runs),
        **texts,
    )


def place(run: Run) -> tuple[float, float]:
    """Return lambda and alpha of a run of Gram-Gauss-Newton."""
    return float(run.own_settings[LAM]), float(run.own_settings[ALPHA])


def is_placed(run: Run) -> bool:
    """Return whether a run has a finite lambda and alpha."""
    values = (run.own_settings[LAM], run.own_settings[ALPHA])
    return all(isinstance(value, float) and math.isfinite(value) for value in values)


def _loss(run: Run, epoch: int) -> float:
    """Return the training loss at an epoch; infinite where the run diverged, then or later, or has no number."""
    if run.diverged:
        return math.inf
    found = [row["train_loss"] for row in run.rows if row["epoch"] == epoch]
    value = found[0] if found else None
    return float(value) if value is not None and math.isfinite(value) else math.inf


def _cell(losses: dict[str, float]) -> Cell:
    loss = statistics.median(losses.values())
    return Cell("finite", loss, losses) if math.isfinite(loss) else Cell("diverged", None, losses)


def _row(lam: float, alpha: float, seed: str | None, loss: float | None, status: str) -> dict[str, Any]:
    return {"lam": lam, "alpha": alpha, "seed": seed, "train_loss": loss, "status": status}
