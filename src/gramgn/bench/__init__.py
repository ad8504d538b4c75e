"""The step benchmark: what a step of Gram-Gauss-Newton costs beside one of SGD, and beside other ways to it.

``measure`` takes all numbers at one shape; ``scripts/bench_step.py`` is its command line. To add a path: one
function that returns a ``Prepared``, one line in ``_paths.py``.
"""

from gramgn.bench._machine import Machine, describe, find_device, safe
from gramgn.bench._measure import Result, Row, Settings, measure
from gramgn.bench._parts import Parts, time_parts
from gramgn.bench._paths import DEFAULT_PATHS, PATHS, Path, choose_paths
from gramgn.bench._problem import Problem, Shape, make_problem
from gramgn.bench._report import (
    breakdown_text,
    csv_rows,
    head_text,
    kernels_text,
    shape_text,
    sweep_text,
    table,
    targets_text,
    write_csv,
)
from gramgn.bench._sweep import BATCHES, Fit, fit_cost, sweep_results, sweep_shapes
from gramgn.bench._targets import DEFAULT_SHAPES, Target, evaluate, num_missed

__all__ = [
    "BATCHES",
    "DEFAULT_PATHS",
    "DEFAULT_SHAPES",
    "PATHS",
    "Fit",
    "Machine",
    "Parts",
    "Path",
    "Problem",
    "Result",
    "Row",
    "Settings",
    "Shape",
    "Target",
    "breakdown_text",
    "choose_paths",
    "csv_rows",
    "describe",
    "evaluate",
    "find_device",
    "fit_cost",
    "head_text",
    "kernels_text",
    "make_problem",
    "measure",
    "num_missed",
    "safe",
    "shape_text",
    "sweep_results",
    "sweep_shapes",
    "sweep_text",
    "table",
    "targets_text",
    "time_parts",
    "write_csv",
]
