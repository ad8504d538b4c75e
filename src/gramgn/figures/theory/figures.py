"""The theory's figures, T1 to T5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from gramgn.figures.theory.convergence import draw_cyclic, draw_methods, draw_quadratic, draw_widths
from gramgn.figures.theory.costs_drawn import draw_costs
from gramgn.figures.theory.records import STUDIES_OF_RUNS, Theory


@dataclass(frozen=True)
class TheoryFigure:
    """One figure of the theory.

    Attributes:
        stem: Its file name without ending.
        number: e.g. `"T1"`.
        title: What it shows.
        alt: The same for readers who cannot see it.
        draw: Draws it.
    """

    stem: str
    number: str
    title: str
    alt: str
    draw: Callable[[], Figure]


def theory_figures(theory: Theory) -> list[TheoryFigure]:
    """Return the figures that there are rows for.

    Args:
        theory: The studies' rows.
    """
    quadratic, cyclic, methods = (theory.study(name) for name in STUDIES_OF_RUNS)
    found = []
    if quadratic:
        found.append(
            TheoryFigure(
                "theory-T1-quadratic",
                "T1",
                "Theorem 1: full-batch GGN converges quadratically",
                "Left: the logarithm of the residual against iterations for several widths M, falling ever faster. "
                "Right: the order of convergence against M, points for the seeds about a line at 2.",
                partial(draw_quadratic, quadratic),
            )
        )
        found.append(
            TheoryFigure(
                "theory-T2-width",
                "T2",
                "What falls with the width M, and how fast",
                "Three panels against M, both axes logarithmic, each with fitted slopes and the line M^(-1/2): the "
                "constant of Theorem 1; the drifts of G and J; the distance of G_0 from the limit kernel K.",
                partial(draw_widths, quadratic),
            )
        )
    if cyclic:
        found.append(
            TheoryFigure(
                "theory-T3-cyclic",
                "T3",
                "Theorem 2: fixed mini-batches contract by the Gauss-Seidel rate",
                "Left: the residual against epochs for several batch sizes, cyclic order beside the prediction rho^t "
                "and random order. Right: the measured rate 1 - c over the predicted 1 - rho for each b and M.",
                partial(draw_cyclic, cyclic),
            )
        )
    if methods:
        found.append(
            TheoryFigure(
                "theory-T4-methods",
                "T4",
                "Gradient descent beside GGN, and λ, α away from (1, 0)",
                "Left: the residual of gradient descent and of GGN against iterations. Right: the residual of GGN "
                "for several lambda and alpha, each beside the rate predicted from G_0.",
                partial(draw_methods, methods),
            )
        )
    if theory.costs:
        found.append(
            TheoryFigure(
                "theory-T5-cost",
                "T5",
                "What the parts of a step cost",
                "Times of the parts of a step and of SGD, both axes logarithmic, left against b and right against m, "
                "with fitted exponents and the slopes that operation counts give.",
                partial(draw_costs, theory.costs),
            )
        )
    return found
