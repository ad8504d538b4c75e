"""From the command line to an exit code: 0 done, 1 failed, 2 bad input, 3 diverged, 128 + signal stopped."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gramgn.app.config import ENTRIES, check_doubled, check_keys, choices_of, plain, run_entries
from gramgn.app.hydra_errors import (
    COMPOSITION_ERRORS,
    check_hydra_keys,
    explain,
    flags_first,
    from_hydra,
    removed_group,
    search_path,
    split_config_dir,
)
from gramgn.app.paths import repository, set_repository, shown
from gramgn.app.plan import Job, restarted_run, resumed_job, run_folder
from gramgn.app.resolvers import register_resolvers
from gramgn.errors import ConfigError, InputError, JobFailedError
from gramgn.progress import say
from gramgn.scheduler import is_preempted, is_to_be_requeued, requeue
from gramgn.stopping import StopAtOnce, StopRequested, raising_signals
from gramgn.world import hush, world

OTHER_LAUNCHER = (
    "this launcher would train all jobs of a sweep in one process, where one that fails ends the others. "
    "Use hydra/launcher=isolated, which runs several jobs at a time with hydra.launcher.n_jobs=<number>, or "
    "hydra/launcher=slurm on a cluster"
)


# The `gramgn.training.Ranks` that this process does a run with, once they have met.
_ranks: Any = None
# The `gramgn.sweep.Sweep` that this process runs: Hydra creates the launcher and keeps it to itself.
_sweeps: list[Any] = []


def register_sweep(sweep: Any) -> None:
    """Let `main` report on a `gramgn.sweep.Sweep` and close it when the command has ended.

    Raises:
        ConfigError: This process is one of several ranks.
    """
    if (mine := world()) is not None:
        raise ConfigError(
            f"a sweep starts its own processes, but this command was started on {mine.size} ranks: start it once, "
            "without torchrun or srun, or start a single run on the ranks"
        )
    _sweeps.append(sweep)


def main(task: Callable[[], Any], root: Path) -> int:
    """Run a `@hydra.main` function and return the process's exit code; on several ranks, end the process with it.

    Args:
        task: The decorated function; it must call `run_job`.
        root: The repository.
    """
    set_repository(root)
    register_resolvers()
    warnings.formatwarning = one_line_warning
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `report_errors`, which explains them

    sys.argv[1:] = flags_first(sys.argv[1:])
    is_saved = True

    def checked() -> None:
        nonlocal is_saved
        hush(world())
        check_hydra_keys(sys.argv[1:])
        try:
            task()
        except StopAtOnce:
            is_saved = any(sweep.has_begun for sweep in _sweeps)  # its jobs save their work
            raise

    def conclude() -> int:
        return max([sweep.conclude(mirror=code in (0, 1)) for sweep in _sweeps], default=0)

    try:
        code = report_errors(checked)
        of_sweeps = report_errors(conclude)
    except SystemExit as end:  # the exit code of a single run
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        of_sweeps = 0
    finally:
        while _sweeps:
            _sweeps.pop().close()
    if is_to_be_requeued(code - 128):
        # A run that cannot even begin to train before its time limit would be started for ever.
        if is_saved or is_preempted():
            requeue()
        elif "SLURM_JOB_ID" in os.environ:
            say(
                "warning: the run had saved nothing since it was started, so that Slurm is not asked to start it "
                "again: raise the time limit (--time), or the seconds of --signal, and submit it again"
            )
    if _ranks is not None:
        _ranks.leave(code)
    return code or of_sweeps


def train_command(words: Sequence[str], root: Path) -> int:
    """Run the command line of `train.py` in this process and return its exit code.

    Args:
        words: The command line without the program's name.
        root: The repository.
    """
    sys.argv = ["train.py", *words]
    task = hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="train")(run_job)
    return main(task, root)


def report_errors(task: Callable[[], int | None], config_name: str = "train") -> int:
    """Do a task and return its exit code (None stands for 0); turn an error into one message on stderr and a code.

    Args:
        task: What is to be done.
        config_name: The top-level file in `conf/` that the task composes, for hints.
    """
    try:
        with raising_signals():
            return task() or 0
    except InputError as error:
        code, message = 2, f"error: {error}"
    except COMPOSITION_ERRORS as error:
        code = 2
        message = f"error: {explain(error, repository() / 'conf', sys.argv[1:], config_name)}"
    except OSError as error:
        code = 2
        unnamed = (
            "the working directory" if error.errno == errno.ENOENT else "where, the system does not report"
        )
        message = f"error: {error.strerror or error}: {error.filename or unnamed}"
    except JobFailedError as error:
        code, message = 1, str(error)
    except StopRequested as error:
        code, message = error.exit_code, str(error)
    except Exception as error:
        if not from_hydra(error):
            raise
        removed = removed_group(sys.argv[1:], repository() / "conf")
        code = 1 if any(sweep.has_begun for sweep in _sweeps) else 2
        what = "the sweeper gave up" if code == 1 else "the command line cannot be used"
        words = " ".join(str(error).split()) or type(error).__name__
        message = f"error: {removed or f'{what}: {words[:400]}'}"
    say(message)
    return code


def run_job(config: DictConfig) -> float | None:
    """Do a single run, new or resumed, and return its best validation loss, None if there is none.

    Raises:
        ConfigError: Hydra's own launcher called this for a job of a sweep.
        SystemExit: The run failed or diverged; Hydra does not pass on what a task returns.
        StopRequested: The user or the system asked to stop.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        raise ConfigError(OTHER_LAUNCHER)
    from gramgn.app.job import train
    from gramgn.app.recording import outcome
    from gramgn.training import join

    global _ranks  # for `main`, to which Hydra does not return what a task returns
    ranks = _ranks = join()
    folder = Path(hydra_config.runtime.output_dir)
    try:
        record = train(ranks.from_first(lambda: _single_job(config, hydra_config, folder)))
    except Exception as error:
        cause = ranks.explained(error)
        if isinstance(cause, InputError | JobFailedError):
            say(f"error: {cause}")
        else:  # a bug, ours or that of a user-defined class
            traceback.print_exception(cause)
        sys.exit(outcome(cause)[1])
    finally:
        # Hydra creates the folder, also of a job that is rejected before it begins.
        if ranks.is_first and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if record["state"] == "diverged":
        sys.exit(3)
    best: float | None = (record.get("best") or {}).get("val_loss")
    return best


def _single_job(config: DictConfig, hydra_config: Any, folder: Path) -> Job:
    """Return the job of a command line: a new one, or that of a run to be resumed."""
    choices = choices_of(hydra_config)
    container = run_entries(plain(config))
    overrides = [str(each) for each in hydra_config.overrides.task]
    check_doubled(overrides)
    check_hydra_keys(map(str, hydra_config.overrides.hydra), is_sweep=False)
    if isinstance(resume := container.get("resume"), str):
        return resumed_job(container, overrides, run_folder("resume", resume).path)
    if (restarted := restarted_run(folder.parent, overrides)) is not None:
        say(f"this job was started again: it continues the run in {shown(restarted)}")
        return resumed_job(container, [], restarted)
    return Job(container, choices, overrides, folder)


def prepare_config(words: list[str]) -> dict[str, Any]:
    """Compose and check `conf/prepare.yaml`: a data set, `image_size` and `archive`.

    Args:
        words: Overrides; `--config-dir <folder>` adds a folder of user-defined choices, as for `train.py`.

    Raises:
        ConfigError: That folder does not exist, a key is given twice, or a key is unknown.
    """
    folders, overrides = split_config_dir(words)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
    check_doubled(overrides)
    check_hydra_keys(overrides, is_sweep=False)
    config = plain(compose_config([*overrides, *search_path(folders)], "prepare"))
    # conf/local may set keys of a training as well.
    check_keys("", run_entries(config), ("dataset", "image_size", "archive", "paths", *ENTRIES))
    return config


def one_line_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """Show only the warning's message; its source location means nothing to users."""
    return f"warning: {message}\n"


def compose_config(overrides: list[str], config_name: str = "train") -> DictConfig:
    """Compose `conf/<config_name>.yaml` with overrides, for scripts."""
    with initialize_config_dir(str(repository() / "conf"), version_base="1.3"):
        return compose(config_name, overrides=overrides)
