"""Opening a W&B run that never waits without a limit, never asks, and reveals nothing about the machine.

This is the only module that imports wandb, and only inside functions: without W&B everything else still works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gramgn.tracking.config import TrackingConfig

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

INIT_GRACE_S = 12.0
"""Seconds beyond `init_timeout_s` after which we stop waiting; W&B itself adds ten."""


def open_run(
    files: Path,
    record: Mapping[str, Any],
    config: TrackingConfig,
    *,
    resume: bool,
    job_type: str | None = None,
) -> Any:
    """Open a W&B run under the run's own id, or under the one that W&B gave it before.

    An agent of W&B's sweeps chooses the id by the environment; then the result has another one.

    Args:
        files: Where W&B creates its folder `wandb`.
        record: `id`, `wandb.id`, `name`, `group`, `config`, `dataset`, `model`, `optimizer` and `git` of run.json are
            used.
        config: Mode (`"online"` or `"offline"`), project and time limits.
        resume: Whether to continue the run of that id on the server instead of replacing it.
        job_type: The kind of job. Default: the optimizer's name.

    Raises:
        Exception: Any error of W&B, or TimeoutError.
    """
    import wandb

    dataset, optimizer, model, git = (
        record.get(key) or {} for key in ("dataset", "optimizer", "model", "git")
    )
    settings = wandb.Settings(
        project=config.project,
        entity=config.entity,
        run_group=record.get("group"),
        run_job_type=job_type or optimizer.get("name"),
        run_name=record.get("name"),
        run_id=(record.get("wandb") or {}).get("id") or record["id"],
        run_tags=tuple(str(dataset[key]) for key in ("kind", "name") if dataset.get(key)),
        mode="online" if config.mode == "online" else "offline",
        root_dir=str(files),
        # Offline, W&B would ignore this with a warning: the id alone joins the parts.
        resume="allow" if resume and config.mode == "online" else None,
        init_timeout=config.init_timeout_s,
        finish_timeout=config.finish_timeout_s,
        finish_timeout_raises=True,
        silent=True,
        symlink=False,
        # Whatever reveals the machine or the user: host, account, command line, code, console, hardware.
        host="",
        username="",
        email="",
        program="",
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    run = bounded(
        lambda: wandb.init(config=dict(record.get("config") or {}), settings=settings, reinit="create_new"),
        config.init_timeout_s + INIT_GRACE_S,
    )
    for family, axis in (("by_epoch", "epoch"), ("by_time", "train_s")):
        run.define_metric(f"{family}/{axis}")
        run.define_metric(f"{family}/*", step_metric=f"{family}/{axis}")
    provenance = {
        "dataset": dataset.get("name"),
        "dataset_kind": dataset.get("kind"),
        "dataset_manifest_sha256": dataset.get("manifest_sha256"),
        "model": model.get("name"),
        "optimizer": optimizer.get("name"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
    }
    run.summary.update({key: value for key, value in provenance.items() if value is not None})
    return run


def close_run(run: Any, exit_code: int, limit_s: float, summary: Mapping[str, Any] | None = None) -> None:
    """Add what is not None to a W&B run's summary and close the run in bounded time.

    Raises:
        Exception: Any error of W&B, or TimeoutError.
    """
    run.summary.update({key: value for key, value in (summary or {}).items() if value is not None})
    bounded(lambda: run.finish(exit_code=exit_code), limit_s + min(5.0, limit_s))


def log_media(
    run: Any, tables: Mapping[str, pd.DataFrame], images: Mapping[str, Path], staging: Path
) -> None:
    """Log tables and PNG files, by key, as one history row.

    In `staging` W&B keeps a second copy of every table. It must stay until the run is closed (online) or synced
    (offline).
    """
    import wandb

    values: dict[str, Any] = {key: wandb.Table(dataframe=table) for key, table in tables.items()}
    values |= {key: wandb.Image(str(path)) for key, path in images.items()}
    staging.mkdir(parents=True, exist_ok=True)
    # By default W&B stages artifacts in the user's home.
    before = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = str(staging)
    try:
        run.log(values)
    finally:
        del os.environ["WANDB_DATA_DIR"]
        if before is not None:
            os.environ["WANDB_DATA_DIR"] = before


def unreachable(config: TrackingConfig) -> str | None:
    """Return why W&B cannot be used in the given mode, None if it can."""
    if config.mode != "online":
        return None

    def login() -> bool:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        # Without prompt it never waits for a terminal; verify asks the server whether it knows the key.
        return wandb.login(prompt=False, verify=True)

    try:
        logged_in = bounded(login, config.init_timeout_s)
    except Exception as error:
        return one_line(error)
    return None if logged_in else "there is no API key (set WANDB_API_KEY or run `wandb login`)"


def bounded(function: Callable[[], T], limit_s: float) -> T:
    """Return the result of a function that may hang in a network call: then its daemon thread is left behind.

    Raises:
        TimeoutError: It has not returned within `limit_s` seconds.
        Exception: Any error of the function.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="wandb-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return results[0]


def one_line(error: BaseException) -> str:
    """Return an error as one line of bounded length."""
    return " ".join(str(error).split())[:160] or type(error).__name__
