"""Gram-Gauss-Newton for regression networks (arXiv 1905.11675), and a reproducible experiment pipeline.

"GGN" means *Gram*-Gauss-Newton here; elsewhere it often stands for the *generalized* Gauss-Newton matrix.
Public names are resolved on first use (PEP 562), so that `import gramgn` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gramgn.optim import GramGaussNewton, Loop, Rows, SolveError, StepInfo, Stream, Term, Vmap

__version__ = "0.1.0"
__all__ = [
    "GramGaussNewton",
    "Loop",
    "Rows",
    "SolveError",
    "StepInfo",
    "Stream",
    "Term",
    "Vmap",
    "__version__",
]

_HOME_OF = dict.fromkeys(
    ("GramGaussNewton", "Loop", "Rows", "SolveError", "StepInfo", "Stream", "Term", "Vmap"), "gramgn.optim"
)


def __getattr__(name: str) -> Any:
    """Import a public name from its home when it is first asked for."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'gramgn' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
