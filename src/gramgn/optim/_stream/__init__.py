"""The streaming engine: per-sample gradients formed layer by layer inside one ordinary backward pass.

To teach it a module type: one small function in a ``_rules_*.py``, one line in ``_registry.py``.
"""

from gramgn.optim._stream._engine import StreamEngine
from gramgn.optim._stream._linearisation import StreamLinearisation
from gramgn.optim._stream._rules_conv import CONV_PATHS

__all__ = ["CONV_PATHS", "StreamEngine", "StreamLinearisation"]
