"""Measurements of speed and memory, outside the installed package: `python benchmarks/step.py` and its neighbours.

- `step.py`: a step of Gram-Gauss-Newton relative to one of SGD, and to other ways of computing it;
- `terms.py`: a step on a term with derivatives by the inputs relative to plain `torch.func` code;
- `cost.py`: the parts of a step over batch sizes and numbers of parameters, for figure T5;
- `pipeline.py`: start-up, overhead per epoch and memory of a training run;
- `prepare.py`: preparing images relative to bare decoding.

To add a way of computing the step: one function that returns a `Prepared` and one line in `paths.py`.
"""

from benchmarks.breakdown import PARTS, Breakdown, Interval, exclusive, launched_within, profile_step
from benchmarks.convolutions import Convolution, least_ratio, time_convolutions
from benchmarks.counts import count_operations
from benchmarks.fit import fit_cost
from benchmarks.measure import Result, Row, Settings, measure, peak_mib
from benchmarks.packages import Prepared
from benchmarks.paths import PATHS, Path, choose_paths, ours, parameters_of
from benchmarks.problem import Problem, Shape, make_problem
from benchmarks.reporting import shape_text
from benchmarks.targets import TARGETS, shortfalls
from benchmarks.timing import Spread, interleaved, ratios

__all__ = [
    "PARTS",
    "PATHS",
    "TARGETS",
    "Breakdown",
    "Convolution",
    "Interval",
    "Path",
    "Prepared",
    "Problem",
    "Result",
    "Row",
    "Settings",
    "Shape",
    "Spread",
    "choose_paths",
    "count_operations",
    "exclusive",
    "fit_cost",
    "interleaved",
    "launched_within",
    "least_ratio",
    "make_problem",
    "measure",
    "ours",
    "parameters_of",
    "peak_mib",
    "profile_step",
    "ratios",
    "shape_text",
    "shortfalls",
    "time_convolutions",
]
