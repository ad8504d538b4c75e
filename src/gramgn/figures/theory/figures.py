"""The theory's figures, T1 to T5."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from gramgn.figures.drawing import THEORY, Drawing
from gramgn.figures.theory.convergence import draw_cyclic, draw_methods, draw_quadratic, draw_widths
from gramgn.figures.theory.cost import draw_costs
from gramgn.figures.theory.table import STUDIES_OF_RUNS, Theory

_FIGURES: tuple[tuple[str, str, str, str, Callable[[pd.DataFrame], Figure]], ...] = (
    (
        "quadratic",
        "T1-quadratic",
        "Theorem 1: full-batch GGN converges quadratically",
        "Left: the logarithm of the residual against iterations for several widths M, falling ever faster. "
        "Right: the order of convergence against M, points for the seeds about a line at 2.",
        draw_quadratic,
    ),
    (
        "quadratic",
        "T2-width",
        "What falls with the width M, and how fast",
        "Three panels against M, both axes logarithmic, each with fitted slopes and the line M^(-1/2): the "
        "constant of Theorem 1; the drifts of G and J; the distance of G_0 from the limit kernel K.",
        draw_widths,
    ),
    (
        "cyclic",
        "T3-cyclic",
        "Theorem 2: fixed mini-batches contract by the Gauss-Seidel rate",
        "Left: the residual against epochs for several batch sizes, cyclic order next to the prediction rho^t "
        "and random order. Right: the measured rate 1 - c over the predicted 1 - rho for each b and M.",
        draw_cyclic,
    ),
    (
        "methods",
        "T4-methods",
        "Gradient descent next to GGN, and λ, α away from (1, 0)",
        "Left: the residual of gradient descent and of GGN against iterations. Right: the residual of GGN "
        "for several lambda and alpha, each next to the rate predicted from G_0.",
        draw_methods,
    ),
    (
        "cost",
        "T5-cost",
        "What the parts of a step cost",
        "Times of the parts of a step and of SGD, both axes logarithmic, left against b and right against m, "
        "with fitted exponents and the slopes that operation counts give.",
        draw_costs,
    ),
)
"""Study, end of the file name, title, the same in words for readers who cannot see it, how it is drawn."""


def theory_figures(theory: Theory) -> list[Drawing]:
    """Return the figures that there are rows for."""
    rows = {study: theory.study(study) for study in STUDIES_OF_RUNS} | {"cost": theory.costs}
    return [
        Drawing(f"theory-{name}", f"{name[:2]}: {title}", partial(draw, rows[study]), None, THEORY, alt)
        for study, name, title, alt, draw in _FIGURES
        if len(rows[study])
    ]
