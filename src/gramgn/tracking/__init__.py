"""What a run leaves behind: its records (the truth), where it comes from, and the W&B mirror of it."""

from ._mirror import MODES, WandbMirror
from ._provenance import git_state, portable, processor_name, start_record, versions
from ._upload import upload_run

__all__ = [
    "MODES",
    "WandbMirror",
    "git_state",
    "portable",
    "processor_name",
    "start_record",
    "upload_run",
    "versions",
]
