"""The summary run of a sweep: all its jobs as one table, and the heatmap as an image."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import RunFolder, SweepFolder, count_states, final_loss, override_key, runs
from gramgn.tracking.client import bounded, close_run, log_media, one_line, open_run, unreachable
from gramgn.tracking.config import TrackingConfig
from gramgn.tracking.mirror import upload_later
from gramgn.tracking.replay import NothingToUploadError, upload_files

if TYPE_CHECKING:
    import pandas as pd

Draw: TypeAlias = Callable[[Path, Path], bool]
"""Draws the heatmap of a sweep's folder into a PNG file; returns False if the sweep has none."""

_COLUMNS = {"optimizer.lam": "lam", "optimizer.alpha": "alpha", "seed": "seed"}


def sweep_table(folder: Path) -> pd.DataFrame:
    """Return one row per job of a sweep, in the sweep's order, from its records alone.

    Columns: `lam`, `alpha` (in the configured convention), `seed`, `metric` (training loss at the last epoch, missing
    unless the job is done), `status`, one per further axis of the sweep, `epoch` and `cell` (folder).

    Raises:
        InputError: sweep.json is missing or damaged.
    """
    import numpy as np
    import pandas as pd

    sweep = SweepFolder(folder)
    jobs, axes = sweep.cells(), sweep.read().get("axes") or {}
    found = final_loss(runs(folder, waiting=True, report=lambda line: None)).set_index("folder")
    found = found.reindex([str(job.folder) for job in jobs]).reset_index(drop=True)
    table = found[list(_COLUMNS.values())].copy()
    table["status"] = [job.state for job in jobs]
    is_finite = (table["status"] == "done") & np.isfinite(found["loss"])
    table.insert(3, "metric", found["loss"].where(is_finite))
    commands = [dict(each.split("=", 1) for each in job.overrides if "=" in each) for job in jobs]
    for key in axes:
        if override_key(key) not in _COLUMNS:
            table[key] = [command.get(key) for command in commands]
    table["epoch"] = pd.array([job.epoch for job in jobs], dtype="Int64")
    table["cell"] = [job.folder.name for job in jobs]
    return table


def upload_summary(folder: Path, config: TrackingConfig, draw: Draw | None) -> str:
    """Send a sweep's table, and its heatmap if `draw` finds one, as the sweep's summary run; return what was sent.

    Its id depends only on the sweep's first run, and what W&B has under it is replaced. Offline, W&B's files go to
    `<folder>/upload`.

    Raises:
        NothingToUploadError: No job has begun.
        InputError: The sweep's files are damaged or cannot be written.
        Exception: Any error of W&B.
    """
    sweep = SweepFolder(folder)
    table, content = sweep_table(folder), sweep.read()
    records = []
    for cell in content["cells"]:
        with suppress(InputError):  # it has not begun, or its file is damaged
            records.append(RunFolder(sweep.path / cell["folder"]).read_run())
    if not records:
        raise NothingToUploadError("no job has begun")
    shared = _common(records)
    name = str(content.get("name") or sweep.path.name)
    record = {
        **{key: shared.get(key) for key in ("dataset", "model", "optimizer", "git")},
        "id": hashlib.sha256(f"summary of {records[0].get('id')}".encode()).hexdigest()[:16],
        "name": name,
        # The runs' own: it stays where they are on W&B, also if the folder was renamed.
        "group": shared.get("group") or name,
        "config": {
            "sweep": name,
            "metric": "train_loss",
            "axes": content.get("axes"),
            "shared": shared.get("config"),
        },
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        image = Path(scratch) / "heatmap.png"
        images = {"heatmap": image} if draw is not None and draw(folder, image) else {}
        with upload_files(folder, config.mode) as files:
            run = open_run(files, record, config, job_type="summary", resume=False)
            states = {f"cells_{state}": number for state, number in count_states(table["status"]).items()}
            exit_code = 1
            try:
                cells = table.astype(object).where(table.notna(), None)
                log_media(run, {"cells": cells}, images, files / "wandb" / "staging")
                exit_code = 0
            finally:
                close_run(run, exit_code, config.finish_timeout_s, states)
    return f"summary of {len(table)} jobs ({config.mode}{'' if images else ', no heatmap'})"


def log_summary(
    folder: Path, config: TrackingConfig, draw: Draw | None, *, drawing_timeout_s: float = 20.0
) -> None:
    """Send a sweep's summary when the sweep ends; a failure is reported in one line and does not reach the sweep.

    Online falls back to offline, as for a run. The call ends within the sum of the three time limits.
    """
    if config.mode == "none":
        return

    def work() -> None:
        mode = config.mode
        if problem := unreachable(config):
            say(f"W&B: the sweep's summary stays offline, because {problem}. {upload_later(folder)}")
            mode = "offline"
        upload_summary(folder, replace(config, mode=mode), draw)

    try:
        bounded(work, config.init_timeout_s + config.finish_timeout_s + drawing_timeout_s)
    except NothingToUploadError:
        pass
    except Exception as error:
        say(f"W&B: no summary of the sweep ({one_line(error)}). {upload_later(folder)}")


def _common(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that are the same in all trees, at any depth."""
    shared: dict[str, Any] = {}
    for key, value in trees[0].items():
        values = [tree.get(key) for tree in trees]
        if all(isinstance(each, Mapping) for each in values):
            shared[key] = _common([each for each in values if isinstance(each, Mapping)])
        elif all(key in tree and tree[key] == value for tree in trees):
            shared[key] = value
    return shared
