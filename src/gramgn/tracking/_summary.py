"""The summary run of a sweep: all its cells as one table, and the heatmap as an image."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from gramgn.errors import InputError
from gramgn.progress import say

from ._sent import Target, keep_id, mark_sent, run_target, stored_id, was_sent
from ._sweep_table import SweepTable, sweep_table
from ._upload import Upload, UploadOptions, unreachable
from ._wandb import FINISH_GRACE_S, bounded, log_media, one_line, open_anew

JOB_TYPE = "summary"
# Draws the heatmap of a sweep's folder into a PNG file; False where the sweep has none.
Draw: TypeAlias = Callable[[Path, Path], bool]


def upload_summary(folder: Path, draw: Draw | None, options: UploadOptions | None = None) -> Upload:
    """Send a sweep's table, and its heatmap where it has one, as the sweep's one summary run.

    Its W&B id is kept in the sweep's ``uploads.json``, and what W&B has under it is replaced. A summary that
    was sent before and has not changed is left alone. Offline, W&B's files go into ``<folder>/wandb``.

    Args:
        folder: The sweep's folder.
        draw: Draws the heatmap; None: the table alone.
        options: Default: online, with the project of the sweep's runs.

    Raises:
        InputError: The sweep's files are damaged or cannot be written.
    """
    options = options or UploadOptions()
    table = sweep_table(folder)
    if not any(status != "waiting" for status in table.states):
        return Upload(folder, "left out", "no cell has begun: there is nothing to upload", reached=False)
    shared = {"config": table.run["config"]["shared"], "group": table.run["group"]}
    target = run_target(shared, options.mode, options.project, options.entity, options.group)
    digest = target.digest(table.columns, table.rows, table.run)
    run_id = stored_id(folder)
    is_there = options.mode == "online" or _offline_folders(folder, run_id)
    if is_there and not options.again and was_sent(folder, options.mode, digest):
        return Upload(folder, "unchanged", "summary uploaded before", reached=False)
    if run_id is None:
        # Before anything is sent: an upload that is cut off is replaced by the next one.
        run_id = secrets.token_hex(4)
        keep_id(folder, run_id)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        image = Path(scratch) / "heatmap.png"
        images = {"heatmap": image} if draw is not None and draw(folder, image) else {}
        files = Path(scratch)
        if options.mode == "offline":
            files = folder
            _remove_offline_files(folder, run_id)
        try:
            _send(table, target, run_id, images, files, options.timeout_s)
        except Exception as error:
            return Upload(folder, "failed", f"the summary was not uploaded: {one_line(error)}")
    mark_sent(folder, options.mode, digest)
    extra = "" if images else ", no heatmap"
    return Upload(folder, "uploaded", f"summary of {len(table.rows)} cells sent ({options.mode}{extra})")


def log_summary(folder: Path, draw: Draw | None, options: UploadOptions, limit_s: float) -> None:
    """Send a sweep's summary where the sweep ends: nothing that fails here reaches the sweep, it is only said.

    Online falls back to offline, as for a run.

    Args:
        folder: The sweep's folder.
        draw: Draws the heatmap; None: the table alone.
        options: How.
        limit_s: Seconds after which the sweep no longer waits.
    """

    def work() -> Upload:
        if problem := unreachable(options):
            say(f"W&B: the sweep's summary stays offline, because {problem}. {_later(folder)}")
            return upload_summary(folder, draw, replace(options, mode="offline"))
        return upload_summary(folder, draw, options)

    try:
        result = bounded(work, limit_s)
    except Exception as error:
        say(f"W&B: no summary of the sweep ({one_line(error)}). {_later(folder)}")
        return
    if result.state == "failed":
        say(f"W&B: {result.detail}. {_later(folder)}")


def _later(folder: Path) -> str:
    return f"All records are on disk; to upload them: python scripts/upload_runs.py {folder}"


def _send(
    table: SweepTable, target: Target, run_id: str, images: dict[str, Path], files: Path, timeout_s: float
) -> None:
    options = {
        "project": target.project,
        "entity": target.entity,
        "run_group": target.group,
        "run_job_type": JOB_TYPE,
        "run_name": table.name,
        "init_timeout": timeout_s,
        "finish_timeout": timeout_s,
    }
    run = open_anew(files, table.run, target.mode, run_id, options)
    try:
        run.summary.update({f"cells_{status}": number for status, number in table.states.items()})
        log_media(run, {"cells": (table.columns, table.rows)}, images, _staging(files))
    except BaseException:
        bounded(lambda: run.finish(exit_code=1), timeout_s + FINISH_GRACE_S)
        raise
    bounded(lambda: run.finish(exit_code=0), timeout_s + FINISH_GRACE_S)


def _staging(files: Path) -> Path:
    return files / "wandb" / "staging"


def _offline_folders(folder: Path, run_id: str | None) -> list[Path]:
    """Return W&B's own folders of earlier offline summaries that hold a run."""
    return [file.parent for file in folder.glob(f"wandb/offline-run-*-{run_id}/*.wandb")]


def _remove_offline_files(folder: Path, run_id: str) -> None:
    """Remove earlier summaries: two files of one id would be a run and its double to ``wandb sync``."""
    try:
        for earlier in _offline_folders(folder, run_id):
            shutil.rmtree(earlier)
        if _staging(folder).exists():
            shutil.rmtree(_staging(folder))
    except OSError as error:
        raise InputError(f"cannot replace {folder / 'wandb'}: {error.strerror or error}") from error
