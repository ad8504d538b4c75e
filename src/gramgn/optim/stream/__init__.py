"""The streaming engine: per-sample gradients formed layer by layer within one ordinary backward pass.

`engine` runs a step, `capture` records the forward pass, `samples` finds where the samples are in its results,
`backward` collects the layers' blocks, `rules`, `conv`, `nodes` and `fallback` compute them, `accumulate` sums G,
`products` does the arithmetic, and `jacobian` multiplies with J. `budget` decides whether J fits into memory, and
`groups` forms it in parts where it does not.
To support another module type, write one small function in `rules.py` and register it there.
"""

from gramgn.optim.stream.blocks import Buffers, Memory
from gramgn.optim.stream.budget import BudgetError
from gramgn.optim.stream.conv import CONV_PATHS, PATHS, applicable, geometry_of, static_choice
from gramgn.optim.stream.engine import StreamEngine
from gramgn.optim.stream.groups import GroupedJacobian, InGroups
from gramgn.optim.stream.jacobian import StreamLinearisation
from gramgn.optim.stream.products import BACKENDS, Products

__all__ = [
    "BACKENDS",
    "CONV_PATHS",
    "PATHS",
    "BudgetError",
    "Buffers",
    "GroupedJacobian",
    "InGroups",
    "Memory",
    "Products",
    "StreamEngine",
    "StreamLinearisation",
    "applicable",
    "geometry_of",
    "static_choice",
]
