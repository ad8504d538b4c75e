"""Drawing what the parts of a step cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gramgn.theory.rates import fitted_exponent

from .._style import PALETTE
from ._cost_claims import cost_axes
from ._parts import (
    DASHES,
    GUIDE,
    HEIGHT,
    MARKERS,
    WIDTH,
    legend,
    log_sizes,
    sizes_with_bars,
)
from ._records import Cost


def draw_costs(costs: Sequence[Cost]) -> Figure:
    """Draw T5: times of the parts of a step and of SGD against b and against m."""
    over_b, over_m = cost_axes(costs)
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.3))
    left, right = figure.subplots(1, 2, sharey=True)
    first = costs[0]
    rounds = max(cost.round for cost in costs)
    figure.suptitle(
        f"T5  cost of the parts of a step, ResNetFixup on noise, {first.pixels}×{first.pixels}; "
        f"medians of {rounds} rounds on {first.device}",
        fontsize=7.5,
    )
    parts: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
        ("(A) forward, backward, J", PALETTE[0], lambda cost: cost.part_A_s),
        ("(B) Gram product", PALETTE[1], lambda cost: cost.gram_s),
        ("(B) solve, float64", PALETTE[2], lambda cost: cost.solve_s),
        ("a step of SGD", PALETTE[4], lambda cost: cost.sgd_s),
    )
    of_b: Callable[[Cost], float] = lambda cost: cost.b  # noqa: E731
    of_m: Callable[[Cost], float] = lambda cost: cost.m  # noqa: E731
    axes_of = ((left, over_b, of_b, "b"), (right, over_m, of_m, "m"))
    for axes, rows, size, name in axes_of:
        sizes = sorted({size(cost) for cost in rows})
        for place, (label, color, seconds) in enumerate(parts):
            points = {value: [1e3 * seconds(cost) for cost in rows if size(cost) == value] for value in sizes}
            medians = [statistics.median(points[value]) for value in sizes]
            fitted = (
                f", ~{name}^{fitted_exponent(sizes, medians):.2f}"
                if len(sizes) > 1 and min(medians) > 0
                else ""
            )
            sizes_with_bars(axes, points, color, MARKERS[place], label + fitted, dashes=DASHES[place])
        log_sizes(axes, sizes, thousands=name == "m")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        legend(axes)
    left.set(xlabel=f"batch size b ({over_b[0].network}, m = {over_b[0].m:,})", ylabel="time (ms)")
    right.set(xlabel=f"parameters m (b = {over_m[0].b})")
    _count_guides(left, over_b, of_b, {"b": 1, "b²": 2})
    _count_guides(right, over_m, of_m, {"m": 1})
    return figure


def _count_guides(
    axes: Axes, rows: Sequence[Cost], size: Callable[[Cost], float], powers: Mapping[str, int]
) -> None:
    """Draw the slopes that operation counts give, from the middle of the panel."""
    sizes = sorted({size(cost) for cost in rows})
    if len(sizes) < 2:
        return
    low, high = axes.get_ylim()
    top = high
    for name, power in powers.items():
        values = [top * (value / sizes[-1]) ** power for value in sizes]
        axes.plot(sizes, values, **GUIDE)
        axes.annotate(
            name, (sizes[-1], values[-1]), (3, -4), textcoords="offset points", size=7, color="#777777"
        )
    axes.set_ylim(low, high)
