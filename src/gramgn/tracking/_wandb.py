"""Opening a W&B run that never waits, never asks and tells nothing about the machine.

The only module that imports wandb, and only inside functions: without W&B everything else still works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gramgn.progress import say

T = TypeVar("T")

# Seconds beyond W&B's own limits (init: it adds ten of grace itself) after which we stop waiting.
INIT_GRACE_S = 12.0
FINISH_GRACE_S = 5.0


def open_run(
    folder: Path,
    files: Path,
    run: Mapping[str, Any],
    mode: str,
    run_id: str,
    options: Mapping[str, Any],
    *,
    resumed: bool,
) -> tuple[Any, str]:
    """Open a W&B run; online falls back to offline and offline to nothing, each with one line on stderr.

    Args:
        folder: The run folder, for messages.
        files: Where W&B makes its folder ``wandb``.
        run: The content of ``run.json``.
        mode: ``"offline"`` or ``"online"``.
        run_id: The id of the run.
        options: Further fields of ``wandb.Settings``, with ``init_timeout`` and ``finish_timeout`` [s].
        resumed: Whether a run of that id was begun before.

    Returns:
        The W&B run, or ``None`` if even offline failed; and the mode it is in, ``"none"`` in that case.
    """
    problem = online_problem(options["init_timeout"]) if mode == "online" else None
    for attempt in ("online", "offline"):
        if attempt == "online" and (mode != "online" or problem):
            continue
        try:
            handle = _init(files, run, attempt, run_id, options, resumed=resumed)
        except Exception as error:
            problem = one_line(error)
            continue
        if problem:
            say(f"W&B: working offline, because {problem}. To upload: python scripts/upload_runs.py {folder}")
        return handle, attempt
    say(f"W&B: no mirror of this run ({problem}); its records in {folder} are complete without it.")
    return None, "none"


def open_anew(files: Path, run: Mapping[str, Any], mode: str, run_id: str, options: Mapping[str, Any]) -> Any:
    """Open a W&B run that replaces what there is of that id, in this mode or not at all.

    Args:
        files: Where W&B makes its folder ``wandb``.
        run: The content of ``run.json``, or what a sweep's summary puts in its place.
        mode: ``"offline"`` or ``"online"``; for online see first that :func:`online_problem` finds none.
        run_id: The id of the run.
        options: As for :func:`open_run`.

    Raises:
        Exception: Whatever W&B raised, or TimeoutError.
    """
    return _init(files, run, mode, run_id, options, resumed=False)


def log_media(
    run: Any,
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]],
    images: Mapping[str, Path],
    staging: Path,
) -> None:
    """Log tables and images as one history row.

    Args:
        run: The W&B run.
        tables: Columns and rows by key.
        images: PNG files by key.
        staging: Where W&B keeps a second copy of every table until it is uploaded; made if missing. It must
            stay until the run is closed (online) or synchronised (offline).
    """
    import wandb

    values: dict[str, Any] = {
        key: wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        for key, (columns, rows) in tables.items()
    }
    values |= {key: wandb.Image(str(path)) for key, path in images.items()}
    staging.mkdir(parents=True, exist_ok=True)
    with _data_dir(staging):
        run.log(values)


@contextmanager
def _data_dir(folder: Path) -> Iterator[None]:
    """Have W&B stage its artifacts in a folder of ours: by default they pile up in the user's home."""
    before = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("WANDB_DATA_DIR", None)
        else:
            os.environ["WANDB_DATA_DIR"] = before


def bounded(function: Callable[[], T], limit_s: float) -> T:
    """Return the function's result, or stop waiting for it after a while.

    Args:
        function: What may hang in a network call. It is left behind in a daemon thread if it does.
        limit_s: Seconds to wait.

    Raises:
        TimeoutError: It has not returned in time.
        Exception: Whatever the function raised.
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
    """Return an error as the start of one line."""
    text = " ".join(str(error).split())
    return (text[:157] + "...") if len(text) > 160 else (text or type(error).__name__)


def online_problem(limit_s: float) -> str | None:
    """Return why online cannot work, or ``None``. Logging in twice is harmless, a second late run is not.

    Args:
        limit_s: Seconds to wait for the server.
    """

    def login() -> bool:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        # Without prompt it never waits for a terminal; verify asks the server whether it knows the key.
        return wandb.login(prompt=False, verify=True)

    try:
        logged_in = bounded(login, limit_s)
    except Exception as error:
        return one_line(error)
    return None if logged_in else "there is no API key (set WANDB_API_KEY or run `wandb login`)"


def _init(
    files: Path, run: Mapping[str, Any], mode: str, run_id: str, options: Mapping[str, Any], *, resumed: bool
) -> Any:
    import wandb

    dataset, optimizer, model = (run.get(key) or {} for key in ("dataset", "optimizer", "model"))
    tags = [str(part[key]) for part, key in ((dataset, "kind"), (dataset, "name")) if part.get(key)]
    settings = wandb.Settings(
        **options,
        mode="online" if mode == "online" else "offline",
        root_dir=str(files),
        run_id=run_id,
        run_tags=tuple(tags),
        # Offline, W&B would ignore this with a warning: the id alone joins the parts.
        resume="allow" if resumed and mode == "online" else None,
        finish_timeout_raises=True,
        silent=True,
        symlink=False,
        # Whatever tells about the machine or the user: host, account, command line, code, console, hardware.
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
    handle = bounded(
        lambda: wandb.init(config=dict(run.get("config") or {}), settings=settings, reinit="create_new"),
        options["init_timeout"] + INIT_GRACE_S,
    )
    for family, axis in (("by_epoch", "epoch"), ("by_time", "train_s")):
        handle.define_metric(f"{family}/{axis}")
        handle.define_metric(f"{family}/*", step_metric=f"{family}/{axis}")
    git = run.get("git") or {}
    provenance = {
        "dataset": dataset.get("name"),
        "dataset_kind": dataset.get("kind"),
        "dataset_manifest_sha256": dataset.get("manifest_sha256"),
        "model": model.get("name"),
        "optimizer": optimizer.get("name"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
    }
    handle.summary.update({key: value for key, value in provenance.items() if value is not None})
    return handle
