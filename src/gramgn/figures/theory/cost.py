"""Drawing what the parts of a step cost."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gramgn.figures.style import PALETTE, as_words
from gramgn.figures.theory.parts import (
    DASHES,
    GUIDE,
    HEIGHT,
    MARKERS,
    WIDTH,
    legend,
    log_sizes,
    sizes_with_bars,
)
from gramgn.figures.theory.table import cost_axes, median, slopes, with_parts

_LINES = (
    ("(A) forward, backward, J", PALETTE[0], "part_A_s", "forward_ops"),
    ("(B) Gram product", PALETTE[1], "gram_s", "gram_ops"),
    ("(B) solve, float64", PALETTE[2], "solve_s", "solve_ops"),
    ("a step of SGD", PALETTE[4], "sgd_s", "forward_ops"),
)
"""Label, colour, time, and the multiply-adds that the time should grow with."""


def draw_costs(costs: pd.DataFrame) -> Figure:
    """Draw T5: times of the parts of a step and of SGD against b and against m."""
    over_b, over_m = cost_axes(with_parts(costs))
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.3))
    left, right = figure.subplots(1, 2, sharey=True)
    first = over_b.iloc[0]
    figure.suptitle(
        f"T5  cost of the parts of a step, ResNetFixup on noise (SYNTHETIC), {first.pixels}×{first.pixels}\n"
        f"medians of {costs['round'].max()} rounds, bars: least to greatest; on {as_words(first.device)}",
        fontsize=7.5,
    )
    for axes, rows, name in ((left, over_b, "b"), (right, over_m, "m")):
        _draw_parts(axes, rows, name)
        axes.plot([], [], **GUIDE, label="as operation counts grow")
        log_sizes(axes, sorted(rows[name].unique()), thousands=name == "m")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        legend(axes, loc="upper left")
    low, high = left.get_ylim()
    # Room for the legends; counts far below any time add no information.
    left.set_ylim(max(low, 1e-2), high * 40)
    left.set(xlabel=f"batch size b ({as_words(first.network)}, m = {first.m:,})", ylabel="time (ms)")
    right.set(xlabel=f"parameters m (b = {over_m.b.iloc[0]})")
    return figure


def _draw_parts(axes: Axes, rows: pd.DataFrame, name: str) -> None:
    """Draw every part against b or m, with its operation counts through the last point."""
    for place, (label, color, seconds, operations) in enumerate(_LINES):
        milliseconds = 1e3 * rows[seconds]
        medians = milliseconds.groupby(rows[name]).median()
        counts = rows.groupby(name)[operations].first()
        # The solve does not depend on m.
        if counts.nunique() > 1 and medians.min() > 0:
            label += f", ${name}^{{{median([*slopes(rows, seconds, name, 'round').values()]):.2f}}}$"
            if seconds != "sgd_s":
                expected = medians.iloc[-1] * counts / counts.iloc[-1]
                axes.plot(expected.index, expected, **(GUIDE | {"color": color}))
        sizes_with_bars(axes, rows[name], milliseconds, color, MARKERS[place], label, dashes=DASHES[place])
