"""Where everything meets: configuration to objects, objects to a run, a run to records and an exit code.

Importing it imports Hydra but not torch, so that `--help` is quick; what needs torch is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gramgn.app.arguments import CHECKPOINT_NAMES, choice, open_run, read_words, run_tool
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
)
from gramgn.app.folders import check_place, job_name, register_resolvers, safe_name, sweep_dir
from gramgn.app.paths import absolute, repository, set_repository, shown
from gramgn.app.plan import OUTPUT_FILE, Job, resumed_job, split_paths

if TYPE_CHECKING:
    from gramgn.app.evaluate import Result, evaluate_run
    from gramgn.app.export import export_run
    from gramgn.app.job import build_parts, train
    from gramgn.app.predict import Prediction, check_out, find_images, predict_images, write_predictions
    from gramgn.app.recording import outcome
    from gramgn.app.trained import Trained, load_trained

__all__ = [
    "CHECKPOINT_NAMES",
    "OTHER_LAUNCHER",
    "OUTPUT_FILE",
    "Job",
    "Prediction",
    "Result",
    "Trained",
    "absolute",
    "build_dataset",
    "build_parts",
    "check_doubled",
    "check_entries",
    "check_out",
    "check_place",
    "choice",
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
    "safe_name",
    "set_repository",
    "shown",
    "split_paths",
    "sweep_dir",
    "train",
    "write_predictions",
]

# Names whose modules import torch or Pillow.
_HOME_OF = {
    "Prediction": "predict",
    "Result": "evaluate",
    "Trained": "trained",
    "build_parts": "job",
    "check_out": "predict",
    "evaluate_run": "evaluate",
    "export_run": "export",
    "find_images": "predict",
    "load_trained": "trained",
    "outcome": "recording",
    "predict_images": "predict",
    "train": "job",
    "write_predictions": "predict",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"gramgn.app.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'gramgn.app' has no attribute {name!r}")
