"""Where everything meets: configuration to objects, objects to a run, a run to records and an exit code.

Importing it imports Hydra but not torch, so that ``--help`` is quick; :func:`train` and its parts load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gramgn.app._build import build_dataset
from gramgn.app._folders import check_place, job_name, register_resolvers, safe_name, sweep_dir
from gramgn.app._main import (
    OTHER_LAUNCHER,
    compose_config,
    main,
    one_line_warning,
    prepare_config,
    register_sweep,
    report_errors,
    run_job,
)
from gramgn.app._plan import OUTPUT_FILE, Job, resumed_job, split_paths
from gramgn.app._repository import absolute, repository, set_repository, shown
from gramgn.app._schema import check_doubled, choices_of, plain, run_entries

if TYPE_CHECKING:
    from gramgn.app._job import build_parts, train
    from gramgn.app._recording import outcome

__all__ = [
    "OTHER_LAUNCHER",
    "OUTPUT_FILE",
    "Job",
    "absolute",
    "build_dataset",
    "build_parts",
    "check_doubled",
    "check_place",
    "choices_of",
    "compose_config",
    "job_name",
    "main",
    "one_line_warning",
    "outcome",
    "plain",
    "prepare_config",
    "register_resolvers",
    "register_sweep",
    "report_errors",
    "repository",
    "resumed_job",
    "run_entries",
    "run_job",
    "safe_name",
    "set_repository",
    "shown",
    "split_paths",
    "sweep_dir",
    "train",
]

_HOME_OF = {
    "build_parts": "gramgn.app._job",
    "outcome": "gramgn.app._recording",
    "train": "gramgn.app._job",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'gramgn.app' has no attribute {name!r}")
