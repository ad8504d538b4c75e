"""Where everything meets: configuration to objects, objects to a run, a run to records and an exit code.

Importing it imports Hydra but not torch, so that ``--help`` is quick; :func:`train` and its parts load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gramgn.app._build import build_dataset
from gramgn.app._main import compose_config, main, prepare_config, report_errors, run_job
from gramgn.app._repository import absolute, repository, set_repository, shown
from gramgn.app._schema import plain

if TYPE_CHECKING:
    from gramgn.app._job import train
    from gramgn.app._plan import Job

__all__ = [
    "Job",
    "absolute",
    "build_dataset",
    "compose_config",
    "main",
    "plain",
    "prepare_config",
    "report_errors",
    "repository",
    "run_job",
    "set_repository",
    "shown",
    "train",
]

_HOME_OF = {"train": "gramgn.app._job", "Job": "gramgn.app._plan"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'gramgn.app' has no attribute {name!r}")
