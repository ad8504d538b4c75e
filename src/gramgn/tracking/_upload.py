"""Uploading a run from our own files, whatever became of its W&B files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gramgn.errors import InputError

from ._mirror import WandbMirror
from .records import RunFolder

# A run that still says "running" was killed (or is running: then it has a mirror of its own).
EXIT_CODES = {"done": 0, "diverged": 3, "failed": 1, "interrupted": 130, "running": 1}


def upload_run(
    folder: RunFolder,
    *,
    mode: str = "online",
    project: str = "gramgn",
    entity: str | None = None,
    group: str | None = None,
    timeout_s: float = 60.0,
) -> tuple[int, str | None]:
    """Send the configuration and every row of a run to W&B, under the run's own id.

    What the server has under that id is replaced, so that the run is there once and whole, however often it
    was killed, resumed or uploaded before.

    Args:
        folder: The run.
        mode: ``"online"``, or ``"offline"`` to write W&B's files into ``<run folder>/upload``.
        project: W&B project.
        entity: W&B team or user; ``None`` is the account's default.
        group: The sweep it belongs to.
        timeout_s: Longest wait for W&B at each step, in seconds.

    Returns:
        The number of rows sent, and ``None`` or one line saying what did not work.

    Raises:
        InputError: The run has no rows, its files are damaged, or another process is writing it.
    """
    run, rows = folder.read_run(), folder.read_metrics()
    if not rows:
        raise InputError(f"{folder.metrics_csv} has no rows yet: there is nothing to upload.")
    with folder.lock(), tempfile.TemporaryDirectory() as scratch:
        files = folder.path / "upload" if mode == "offline" else Path(scratch)
        files.mkdir(exist_ok=True)
        mirror = WandbMirror.start(
            folder,
            run,
            mode=mode,
            project=project,
            entity=entity,
            group=group,
            run_id=(run.get("wandb") or {}).get("id"),
            resume=False,
            files=files,
            init_timeout_s=timeout_s,
            finish_timeout_s=timeout_s,
        )
        (files / "wandb" / "mirrored.json").unlink(missing_ok=True)
        sent = mirror.log_rows(rows)
        error = run.get("error") or {}
        message = mirror.finish(EXIT_CODES[run["state"]], error.get("message"), run.get("best"))
        if mirror.mode != mode:
            return 0, f"nothing was uploaded: W&B could not be used {mode}"
        if not run.get("wandb"):
            # The next upload then replaces this one instead of standing beside it.
            folder.update_run(wandb=mirror.record)
    return sent, message
