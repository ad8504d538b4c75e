"""The streaming engine: per-sample gradients formed layer by layer inside one ordinary backward pass.

To teach it a module type: one small function in a ``_rules_*.py``, one line in ``_registry.py``.
"""

from gramgn.optim._stream._engine import StreamEngine

__all__ = ["StreamEngine"]
