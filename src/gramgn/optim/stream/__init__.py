"""The streaming engine: per-sample gradients formed layer by layer within one ordinary backward pass.

`engine` runs a step, `capture` records the forward pass, `backward` collects the layers' blocks, `rules`, `conv` and
`fallback` compute them, `accumulate` sums G, and `jacobian` multiplies with J.
To support another module type, write one small function in `rules.py` and register it there.
"""

from gramgn.optim.stream.accumulate import gram_of
from gramgn.optim.stream.blocks import Buffers, Memory
from gramgn.optim.stream.conv import CONV_PATHS, PATHS, applicable, static_choice
from gramgn.optim.stream.engine import StreamEngine
from gramgn.optim.stream.jacobian import StreamLinearisation

__all__ = [
    "CONV_PATHS",
    "PATHS",
    "Buffers",
    "Memory",
    "StreamEngine",
    "StreamLinearisation",
    "applicable",
    "gram_of",
    "static_choice",
]
