"""What a run leaves behind: its records (the truth), where it comes from, and the W&B mirror of it."""

from ._mirror import MODES, WandbMirror
from ._summary import log_summary, upload_summary
from ._sweep_table import SweepTable, sweep_table
from ._upload import Upload, UploadOptions, unreachable, upload_run
from ._upload_all import find_uploads, upload_all, upload_table

__all__ = [
    "MODES",
    "SweepTable",
    "Upload",
    "UploadOptions",
    "WandbMirror",
    "find_uploads",
    "log_summary",
    "sweep_table",
    "unreachable",
    "upload_all",
    "upload_run",
    "upload_summary",
    "upload_table",
]
