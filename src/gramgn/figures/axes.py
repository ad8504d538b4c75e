"""Axes: names with units, logarithmic values, and a ceiling that keeps overshoot from flattening the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gramgn.figures.curves import Comparison, is_standardized, unit_of

_NAMES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "test_loss": "test loss",
    "train_mae": "training error",
    "val_mae": "validation error",
    "test_mae": "test error",
}


# What is beyond is marked at the ends: an axis cannot have ends near those of float64.
SMALLEST, LARGEST = 1e-100, 1e100


@dataclass(frozen=True)
class ValueScale:
    """The vertical axis of a row of panels.

    Attributes:
        label: Name of the quantity with its unit.
        low: Lower end.
        high: Upper end; what is above leaves the panel, and is marked there.
        is_standardized: Whether 1 means predicting the mean.
    """

    label: str
    low: float
    high: float
    is_standardized: bool

    def apply(self, panels: Sequence[Axes]) -> None:
        """Set up the panels of a row, the leftmost with the label."""
        panels[0].set_ylabel(self.label)
        for axes in panels:
            axes.set_ylim(self.low, self.high)  # first: a change of scale looks at the data otherwise
            axes.set_yscale("log", nonpositive="mask")
            steps = _tick_steps(math.log10(self.high / self.low))
            axes.yaxis.set_major_locator(LogLocator(10, subs=steps, numticks=12))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        if self.is_standardized and self.low < 1.0 < self.high:
            self._mark_mean(panels)

    def _mark_mean(self, panels: Sequence[Axes]) -> None:
        for axes in panels:
            axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=1)
        place, side = _freest_corner(panels[-1], self.low, self.high)
        panels[-1].annotate(
            "predicting the mean",
            xy=(place, 1.0),
            xycoords=panels[-1].get_yaxis_transform(),
            xytext=(3 if place == 0.0 else 0, 1.5 if side == "bottom" else -1.5),
            textcoords="offset points",
            ha="right" if place else "left",
            va=side,
            size=6.5,
            color="#777777",
            zorder=1.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _freest_corner(axes: Axes, low: float, high: float) -> tuple[float, Literal["bottom", "top"]]:
    """Return the end and the side of the line of the mean at which the words cover the fewest curves."""
    height = 0.1 * math.log10(high / low)  # of the words, in decades
    end = axes.get_xlim()[1]

    def hits(corner: tuple[float, Literal["bottom", "top"]]) -> float:
        place, side = corner
        sign = 1.0 if side == "bottom" else -1.0
        if math.log10(high if side == "bottom" else 1 / low) < height:
            return math.inf
        words = end * (np.linspace(0.0, 0.33, 15) + 0.67 * place)
        count = 0
        for line in axes.lines:
            x, y = (np.asarray(data, float) for data in line.get_data())
            at = words[(words >= x.min()) & (words <= x.max())]
            above = sign * np.interp(at, x, np.log10(y, out=np.full_like(y, np.nan), where=y > 0))
            count += int(np.sum((above > 0.1 * height) & (above < height)))
        return count

    corners: tuple[tuple[float, Literal["bottom", "top"]], ...] = (
        (1.0, "bottom"),
        (1.0, "top"),
        (0.0, "bottom"),
        (0.0, "top"),
    )
    return min(corners, key=hits)


def value_scale(comparison: Comparison, column: str) -> ValueScale | None:
    """Return the vertical axis for a metric, or None if no run has a positive value.

    It is logarithmic, from the least to the greatest positive value.
    """
    rows = comparison.rows.sort_values(["run", "epoch"], kind="stable")
    rows = rows[np.isfinite(rows[column].astype(float))]
    if not (rows[column] > 0).any():
        return None
    label = _label(comparison, column)
    values = rows[column][rows[column] > 0]
    is_relative = is_standardized(comparison.rows) and column.endswith("_loss")
    starts = rows[rows.run.isin(rows.run[values.index])].drop_duplicates("run")[column]
    # A standardised loss of 30 is thirty times that of predicting the mean: overshoot, not learning.
    ceiling = 30.0 if is_relative else 10.0 * float(starts.min())
    low, high = float(values.min()) / 1.2, float(values.max()) * 1.2
    low, high = min(max(low, SMALLEST), LARGEST), min(max(high, 1.44 * SMALLEST), 1.44 * LARGEST)
    if low < ceiling < high:
        high = ceiling
    if is_relative and 1.0 < high < 1.6:
        high = 1.6  # room for the words above the line of the mean
    return ValueScale(label, low, high, is_relative)


def time_unit(comparison: Comparison) -> tuple[float, str]:
    """Return how many seconds the unit of the time axis has, and its name."""
    longest = comparison.rows.train_s.max()
    if pd.isna(longest) or longest < 300:
        return 1.0, "s"
    return (60.0, "min") if longest < 3 * 3600 else (3600.0, "h")


def _label(comparison: Comparison, column: str) -> str:
    name, unit = _NAMES[column], unit_of(comparison.rows)
    if column.endswith("_mae"):
        return f"{name} (mean absolute{'' if unit == '1' else f', {unit}'})"
    if is_standardized(comparison.rows):
        return f"{name} (MSE, standardised)"
    return f"{name} (MSE{'' if unit == '1' else f', {unit}²'})"


def _tick_steps(decades: float) -> tuple[float, ...]:
    if decades > 2.5:
        return (1.0,)
    return (1.0, 2.0, 5.0) if decades > 0.8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
