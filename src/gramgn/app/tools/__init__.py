"""Using what was trained: evaluate, predict, show and export a run, from its folder alone.

The command lines are thin files in ``scripts/``. Names are resolved on first use (PEP 562): showing a run loads
no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gramgn.app.tools._arguments import choice, open_run, read_words

if TYPE_CHECKING:
    from gramgn.app.tools._evaluate import Result, evaluate_run
    from gramgn.app.tools._export import export_run
    from gramgn.app.tools._images import find_images
    from gramgn.app.tools._predict import Prediction, check_out, predict_images, write_predictions
    from gramgn.app.tools._show import show_run
    from gramgn.app.tools._trained import Trained, load_trained

__all__ = [
    "Prediction",
    "Result",
    "Trained",
    "check_out",
    "choice",
    "evaluate_run",
    "export_run",
    "find_images",
    "load_trained",
    "open_run",
    "predict_images",
    "read_words",
    "show_run",
    "write_predictions",
]

_HOME_OF = {
    "Prediction": "_predict",
    "Result": "_evaluate",
    "Trained": "_trained",
    "check_out": "_predict",
    "evaluate_run": "_evaluate",
    "export_run": "_export",
    "find_images": "_images",
    "load_trained": "_trained",
    "predict_images": "_predict",
    "show_run": "_show",
    "write_predictions": "_predict",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch or Pillow when it is first asked for."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"gramgn.app.tools.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'gramgn.app.tools' has no attribute {name!r}")
