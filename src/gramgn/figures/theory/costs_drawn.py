"""Drawing what the parts of a step cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gramgn.figures.style import PALETTE, as_words
from gramgn.figures.theory.costs import cost_axes
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
from gramgn.figures.theory.records import Cost
from gramgn.theory.rates import fitted_exponent


def draw_costs(costs: Sequence[Cost]) -> Figure:
    """Draw T5: times of the parts of a step and of SGD against b and against m."""
    over_b, over_m = cost_axes(costs)
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.3))
    left, right = figure.subplots(1, 2, sharey=True)
    first = over_b[0]
    rounds = max(cost.round for cost in costs)
    figure.suptitle(
        f"T5  cost of the parts of a step, ResNetFixup on noise (SYNTHETIC), {first.pixels}×{first.pixels}\n"
        f"medians of {rounds} rounds, bars: least to greatest; on {as_words(first.device)}",
        fontsize=7.5,
    )
    for axes, rows, name in ((left, over_b, "b"), (right, over_m, "m")):
        sizes = _draw_parts(axes, rows, name)
        axes.plot([], [], **GUIDE, label="as operation counts grow")
        log_sizes(axes, sizes, thousands=name == "m")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        legend(axes, loc="upper left")
    low, high = left.get_ylim()
    # Room for the legends; counts far below any time tell nothing more.
    left.set_ylim(max(low, 1e-2), high * 40)
    left.set(xlabel=f"batch size b ({as_words(over_b[0].network)}, m = {over_b[0].m:,})", ylabel="time (ms)")
    right.set(xlabel=f"parameters m (b = {over_m[0].b})")
    return figure


@dataclass(frozen=True)
class _Part:
    """A line: what it is, in which colour, its time, and the multiply-adds that it should grow with."""

    label: str
    color: str
    seconds: Callable[[Cost], float]
    operations: Callable[[Cost], float]


_PARTS = (
    _Part("(A) forward, backward, J", PALETTE[0], lambda cost: cost.part_A_s, lambda cost: cost.forward_ops),
    _Part("(B) Gram product", PALETTE[1], lambda cost: cost.gram_s, lambda cost: cost.gram_ops),
    _Part("(B) solve, float64", PALETTE[2], lambda cost: cost.solve_s, lambda cost: cost.solve_ops),
    _Part("a step of SGD", PALETTE[4], lambda cost: cost.sgd_s, lambda cost: cost.forward_ops),
)


def _draw_parts(axes: Axes, rows: Sequence[Cost], name: str) -> list[float]:
    """Draw every part against b or m, with its operation counts through the last point; return the sizes."""
    by_size: dict[float, list[Cost]] = {}
    for cost in rows:
        by_size.setdefault(cost.b if name == "b" else cost.m, []).append(cost)
    sizes = sorted(by_size)
    for place, part in enumerate(_PARTS):
        points = {size: [1e3 * part.seconds(cost) for cost in by_size[size]] for size in sizes}
        medians = [statistics.median(points[size]) for size in sizes]
        operations = [part.operations(by_size[size][0]) for size in sizes]
        label = part.label
        # The solve knows nothing of m.
        if len(set(operations)) > 1 and min(medians) > 0:
            label += f", ${name}^{{{_exponent(points):.2f}}}$"
            if not part.label.endswith("SGD"):
                counted = [medians[-1] * count / operations[-1] for count in operations]
                axes.plot(sizes, counted, **(GUIDE | {"color": part.color}))
        sizes_with_bars(axes, points, part.color, MARKERS[place], label, dashes=DASHES[place])
    return sizes


def _exponent(points: Mapping[float, Sequence[float]]) -> float:
    """Return the median over rounds of the fitted exponent, which is the number that the statements give."""
    sizes = sorted(points)
    rounds = zip(*(points[size] for size in sizes), strict=False)
    return statistics.median(fitted_exponent(sizes, times) for times in rounds)
