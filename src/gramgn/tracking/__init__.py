"""The W&B mirror: shows the records of runs and sweeps on a dashboard.

The records on disk are the truth and complete without it; nothing reads W&B back, and no failure in here stops a run.
"""

from gramgn.tracking.client import unreachable
from gramgn.tracking.config import MODES, TrackingConfig
from gramgn.tracking.mirror import WandbMirror
from gramgn.tracking.replay import NothingToUploadError, find_uploads, upload_config, upload_run
from gramgn.tracking.summary import log_summary, sweep_table, upload_summary

__all__ = [
    "MODES",
    "NothingToUploadError",
    "TrackingConfig",
    "WandbMirror",
    "find_uploads",
    "log_summary",
    "sweep_table",
    "unreachable",
    "upload_config",
    "upload_run",
    "upload_summary",
]
