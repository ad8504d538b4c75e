"""Where everything meets: configuration to objects, objects to a run, a run to records and an exit code.

Importing it imports Hydra but not torch, so that `--help` is quick; what needs torch is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gramgn.app.arguments import open_run, read_words, run_tool
from gramgn.app.build import build_dataset
from gramgn.app.config import check_doubled, check_entries, choices_of, plain, run_entries
from gramgn.app.entry import (
    OTHER_LAUNCHER,
    compose_config,
    main,
    one_line_warning,
    prepare_config,
    register_sweep,
    report_errors,
    run_job,
    train_command,
)
from gramgn.app.folders import check_place, job_name, sweep_dir
from gramgn.app.hydra_errors import check_hydra_keys
from gramgn.app.paths import absolute, repository, set_repository, shown
from gramgn.app.plan import OUTPUT_FILE, Job, resumed_job, split_paths
from gramgn.app.resolvers import register_resolvers

if TYPE_CHECKING:
    from gramgn.app.evaluate import evaluate_run
    from gramgn.app.export import export_run
    from gramgn.app.job import build_parts, train
    from gramgn.app.predict import check_out, find_images, predict_images
    from gramgn.app.recording import outcome
    from gramgn.app.trained import Trained, load_trained

__all__ = [
    "OTHER_LAUNCHER",
    "OUTPUT_FILE",
    "Job",
    "Trained",
    "absolute",
    "build_dataset",
    "build_parts",
    "check_doubled",
    "check_entries",
    "check_hydra_keys",
    "check_out",
    "check_place",
    "choices_of",
    "compose_config",
    "evaluate_run",
    "export_run",
    "find_images",
    "job_name",
    "load_trained",
    "main",
    "one_line_warning",
    "open_run",
    "outcome",
    "plain",
    "predict_images",
    "prepare_config",
    "read_words",
    "register_resolvers",
    "register_sweep",
    "report_errors",
    "repository",
    "resumed_job",
    "run_entries",
    "run_job",
    "run_tool",
    "set_repository",
    "shown",
    "split_paths",
    "sweep_dir",
    "train",
    "train_command",
]

# Modules that import torch or Pillow, and their names.
_LAZY = {
    "evaluate": ("evaluate_run",),
    "export": ("export_run",),
    "job": ("build_parts", "train"),
    "predict": ("check_out", "find_images", "predict_images"),
    "recording": ("outcome",),
    "trained": ("Trained", "load_trained"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"gramgn.app.{module}"), name)
    raise AttributeError(f"module 'gramgn.app' has no attribute {name!r}")
