"""Drawing the first epochs step by step, as docs/first_epochs.md shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Row = dict[str, Any]

COLORS = {
    "plain": "#D55E00",
    "last layer not zero": "#7F7F7F",
    "adaptive damping": "#CC79A7",
    "bound": "#E69F00",
    "trace": "#56B4E9",
    "trace + bound": "#0072B2",
    "trace + bound + SPRING": "#000000",
}
SMOOTHED = 8


def rows_by_seed(rows: Sequence[Row], dataset: str, variant: str) -> list[list[Row]]:
    """Return the rows of each seed."""
    own = [row for row in rows if (row["dataset"], row["variant"]) == (dataset, variant)]
    return [[row for row in own if row["seed"] == seed] for seed in sorted({row["seed"] for row in own})]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return geometric means over the last `SMOOTHED` values (fewer at the start): overshoot and decay count alike."""
    logs = [math.log(value) for value in values]
    return [math.exp(fmean(logs[max(0, end - SMOOTHED) : end])) for end in range(1, len(logs) + 1)]


def draw_first_epochs(rows: Sequence[Row], names: Mapping[str, str], *, num_epochs: int) -> Figure:
    """Draw the diagnosis of the paper's rule on the left, and losses with the remedies on the right.

    Args:
        rows: What `scripts/first_epochs.py` measured.
        names: The names of three data sets, by which their panels are called.
        num_epochs: Number of epochs that the losses on the right are shown for.
    """
    figure = Figure(figsize=(7.4, 6.4))
    panels = figure.subplots(3, 2)
    figure.suptitle(
        "The first epochs of ResNetFixup from a zero last layer; lines: medians, bands: range over seeds",
        fontsize=8,
    )
    _draw_diagnosis(panels[:, 0], rows)
    for axes, (dataset, name) in zip(panels[:, 1], names.items(), strict=True):
        axes.axhline(1, color="#999999", linewidth=0.7, linestyle=(0, (2, 2)))
        for variant, color in COLORS.items():
            _band(axes, rows, dataset, variant, "loss", color, variant, last=num_epochs)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high > 2.5 * low else (1, 1.1, 1.2, 8, 9)
        _finish(axes, f"{name}: training loss, mean of {SMOOTHED} steps", steps)
    panels[0, 1].legend(fontsize=6, ncols=2, loc="lower left")
    for axes in panels[2]:
        axes.set_xlabel("step")
    return figure


def _draw_diagnosis(panels: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Draw loss, scale of G and what G resolves, for the paper's rule on synthetic bone age."""
    case = (rows, "rsna_synthetic", "plain")
    loss, scale, share = panels
    _band(loss, *case, "loss", COLORS["plain"], "loss before the step", smooth=False)
    raised = [row["step"] for row in rows_by_seed(*case)[0] if row["loss_after"] > row["loss"]]
    ticks = loss.get_xaxis_transform()
    loss.plot(
        raised, [0.03] * len(raised), "|", color="#000000", transform=ticks, label="seed 0: step raises it"
    )
    loss.set_yscale("log")
    _finish(loss, "plain, SYNTHETIC bone age: stands still, then overshoots", (1, 3))
    for column, shade, label in (
        ("lambda_1", "#0072B2", "largest eigenvalue of G"),
        ("mean_eigenvalue", "#56B4E9", "mean eigenvalue of G"),
        ("alpha_sum", "#000000", "damping αb"),
    ):
        _band(scale, *case, column, shade, label, smooth=False)
    scale.set_yscale("log")
    _finish(scale, "plain: G is of the size of αb at first, far above it afterwards", (1,))
    _band(share, *case, "resolved_share", "#009E73", "share of |r|² with λ > αb", smooth=False)
    share.set_ylim(0, 1.05)
    _finish(share, "plain: the step resolves next to nothing, then nearly all", None)
    for axes in panels:
        axes.legend(fontsize=6, loc="upper left")


def _finish(axes: Axes, title: str, steps: tuple[float, ...] | None) -> None:
    """Set title and ticks; `steps`: the labelled multiples of powers of ten on a logarithmic axis."""
    axes.set_title(title, fontsize=7.5, loc="left")
    axes.set_xlim(left=1)
    if steps is not None:
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _band(
    axes: Axes,
    rows: Sequence[Row],
    dataset: str,
    variant: str,
    column: str,
    color: str,
    label: str,
    *,
    smooth: bool = True,
    last: int | None = None,
) -> None:
    """Draw the median over seeds of a column against the steps of whole batches, and its range."""
    seeds = [
        [row for row in steps if row["b"] == steps[0]["b"] and (last is None or row["epoch"] <= last)]
        for steps in rows_by_seed(rows, dataset, variant)
    ]
    if not seeds:
        return
    curves = [[row[column] for row in steps] for steps in seeds]
    values = list(zip(*(map(_smoothed, curves) if smooth else curves), strict=True))
    x = [row["step"] for row in seeds[0]]
    axes.plot(x, [median(each) for each in values], color=color, linewidth=1.1, label=label)
    axes.fill_between(
        x,
        [min(each) for each in values],
        [max(each) for each in values],
        color=color,
        alpha=0.15,
        linewidth=0,
    )
