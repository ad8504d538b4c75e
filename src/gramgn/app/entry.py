"""From the command line to an exit code: 0 done, 1 failed, 2 bad input, 3 diverged, 130 and 143 stopped."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hydra.types import RunMode
from omegaconf import DictConfig

from gramgn.app.config import ENTRIES, check_doubled, check_keys, choices_of, plain, run_entries
from gramgn.app.folders import register_resolvers
from gramgn.app.hydra_errors import COMPOSITION_ERRORS, explain, from_hydra
from gramgn.app.paths import repository, set_repository
from gramgn.errors import ConfigError, InputError, JobFailedError, first_line
from gramgn.stopping import StopRequested, raising_signals

OTHER_LAUNCHER = (
    "this launcher would train all jobs of a sweep in one process, where one that fails ends the others. "
    "Use hydra/launcher=isolated, which runs several jobs at a time with hydra.launcher.n_jobs=<number>"
)


class RunningSweep(Protocol):
    """What `main` asks of the sweep that this process runs."""

    @property
    def has_begun(self) -> bool:
        """Whether any of its jobs had to be run."""

    def conclude(self, *, mirror: bool) -> int:
        """Report on all jobs and return the exit code."""

    def close(self) -> None:
        """End all of its processes and release its folder."""


# Hydra creates the launcher and keeps it to itself, so it registers its sweep here.
_sweeps: list[RunningSweep] = []


def register_sweep(sweep: RunningSweep) -> None:
    """Let `main` report on a sweep and close it when the command has ended."""
    _sweeps.append(sweep)


def main(task: Callable[[], Any], root: Path) -> int:
    """Run a `@hydra.main` function and return the process's exit code.

    Args:
        task: The decorated function; it must call `run_job`.
        root: The repository.
    """
    set_repository(root)
    register_resolvers()
    warnings.formatwarning = one_line_warning
    code = [0]
    try:
        with report_errors(code):
            task()
        with report_errors(code):
            of_sweeps = [sweep.conclude(mirror=code[0] in (0, 1)) for sweep in _sweeps]
            code[0] = code[0] or max(of_sweeps, default=0)
    except SystemExit as end:  # the exit code of a single run
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        while _sweeps:
            _sweeps.pop().close()
    return code[0]


@contextmanager
def report_errors(code: list[int] | None = None, config_name: str = "train") -> Iterator[None]:
    """Turn an error in the block into one message on stderr and an exit code.

    Args:
        code: A list whose first entry is set to the exit code; None: the process exits with it.
        config_name: The top-level file in `conf/` that is composed in the block, for hints.
    """
    exit_code = 0
    try:
        with raising_signals():
            yield
    except InputError as error:
        exit_code = 2
        print(f"error: {error}", file=sys.stderr)
    except COMPOSITION_ERRORS as error:
        exit_code = 2
        message = explain(error, repository() / "conf", sys.argv[1:], config_name)
        print(f"error: {message}", file=sys.stderr)
    except OSError as error:
        exit_code = 2
        print(
            f"error: {error.strerror or error}: {error.filename or 'the working directory'}", file=sys.stderr
        )
    except JobFailedError as error:
        exit_code = 1
        print(str(error), file=sys.stderr)
    except StopRequested as error:
        exit_code = error.exit_code
        print(str(error), file=sys.stderr)
    except Exception as error:
        if not from_hydra(error):
            raise
        exit_code = 1 if any(sweep.has_begun for sweep in _sweeps) else 2
        what = "the sweeper gave up" if exit_code == 1 else "the command line cannot be used"
        print(f"error: {what}: {first_line(error)}", file=sys.stderr)
    if code is not None:
        code[0] = exit_code or code[0]
    elif exit_code:
        sys.exit(exit_code)


def run_job(config: DictConfig) -> float | None:
    """Do a single run and return its best validation loss, None if there is none.

    Raises:
        ConfigError: Hydra's own launcher called this for a job of a sweep.
        SystemExit: The run failed or diverged; Hydra does not pass on what a task returns.
        StopRequested: The user or the system asked to stop.
    """
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError(OTHER_LAUNCHER)
    from gramgn.app.recording import outcome

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        record = _do(config, folder)
    except Exception as error:
        if isinstance(error, InputError | JobFailedError):
            print(f"error: {error}", file=sys.stderr)
        else:  # a bug, ours or that of a user-defined class
            traceback.print_exception(error)
        sys.exit(outcome(error)[1])
    finally:
        # Hydra creates the folder, also of a job that is rejected before it begins.
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if record["state"] == "diverged":
        sys.exit(3)
    best: float | None = (record.get("best") or {}).get("val_loss")
    return best


def prepare_config(overrides: list[str]) -> dict[str, Any]:
    """Compose and check `conf/prepare.yaml`: a data set, `image_size` and `archive`."""
    config = plain(compose_config(overrides, "prepare"))
    # conf/local may set keys of a training as well.
    check_keys("", run_entries(config), ("dataset", "image_size", "archive", "paths", *ENTRIES))
    return config


def _do(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Train a new run, or resume a stopped one; return run.json."""
    from hydra.core.hydra_config import HydraConfig

    from gramgn.app.job import train
    from gramgn.app.plan import Job, resumed_job, run_folder

    hydra_config = HydraConfig.get()
    container, overrides = run_entries(plain(config)), [str(each) for each in hydra_config.overrides.task]
    check_doubled(overrides)
    if isinstance(resume := container.get("resume"), str):
        return train(resumed_job(container, overrides, run_folder("resume", resume).path))
    return train(Job(config=container, choices=choices_of(hydra_config), overrides=overrides, folder=folder))


def one_line_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """Show only the warning's message; its source location means nothing to users."""
    return f"warning: {message}\n"


def compose_config(overrides: list[str], config_name: str = "train") -> DictConfig:
    """Compose `conf/<config_name>.yaml` with overrides, for scripts."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(repository() / "conf"), version_base="1.3"):
        return compose(config_name, overrides=overrides)
