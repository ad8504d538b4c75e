"""The panels of the paper, and the data that fill them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ._grid import Grid
from ._group import Comparison
from ._run import Run

GRID_SWEEP, CURVES_SWEEP = "lambda_alpha", "lambda_alpha_curves"
DATASETS = {
    "afad": "AFAD-LITE",
    "afad_synthetic": "AFAD-LITE stand-in",
    "rsna": "RSNA Bone Age",
    "rsna_synthetic": "RSNA Bone Age stand-in",
}


@dataclass(frozen=True)
class Panel:
    """One panel of the paper.

    Attributes:
        key: Start of its file names, e.g. ``"fig1a"``.
        number: Its number in the paper, e.g. ``"1a"``.
        family: Which runs it shows: ``"afad"`` or ``"rsna"`` (figure 1's), ``"curves"`` or ``"grid"``.
        column: The column of ``metrics.csv``.
        against_time: Whether its x axis is time, not the epoch.
        command: How its runs are made.
    """

    key: str
    number: str
    family: str
    column: str
    against_time: bool
    command: str


_FIG1 = "python train.py experiment=fig1/{}_ggn_fixup"
PANELS = (
    Panel("fig1a", "1a", "afad", "train_loss", True, _FIG1.format("afad")),
    Panel("fig1b", "1b", "afad", "train_loss", False, _FIG1.format("afad")),
    Panel("fig1c", "1c", "rsna", "train_loss", True, _FIG1.format("rsna")),
    Panel("fig1d", "1d", "rsna", "train_loss", False, _FIG1.format("rsna")),
    Panel("fig2a-time", "2a", "rsna", "test_loss", True, _FIG1.format("rsna")),
    Panel("fig2a-epoch", "2a", "rsna", "test_loss", False, _FIG1.format("rsna")),
    Panel("fig2b", "2b", "curves", "train_loss", False, f"python train.py sweep={CURVES_SWEEP}"),
    Panel("fig2c", "2c", "grid", "train_loss", False, f"python train.py sweep={GRID_SWEEP}"),
)


@dataclass(frozen=True)
class FigureSet:
    """All panels of one kind of data at one scale on one device.

    Attributes:
        name: End of its file names, e.g. ``"synthetic-laptop"``.
        kind: ``"real"`` or ``"synthetic"``.
        scale: e.g. ``"laptop"``.
        device: Name of the device.
        curves: The curves of the families ``"afad"``, ``"rsna"`` and ``"curves"`` that there are.
        grid: Figure 2c, if there is a run for it.
        notes: Lines on what was left out of panels, and on runs of several versions of the code.
    """

    name: str
    kind: str
    scale: str
    device: str
    curves: Mapping[str, Comparison]
    grid: Grid | None
    notes: tuple[str, ...]

    @property
    def panels(self) -> list[Panel]:
        """The panels that there are runs for."""
        return [
            panel for panel in PANELS if panel.family in self.curves or (panel.family == "grid" and self.grid)
        ]

    def runs(self, family: str) -> list[Run]:
        """Return the finished runs of a family, in the order of the legend; none if it is not there."""
        if family == "grid":
            return list(self.grid.runs) if self.grid else []
        return (
            [run for curve in self.curves[family].curves for run in curve.runs]
            if family in self.curves
            else []
        )
