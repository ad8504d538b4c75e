"""From the command line to an exit code: 0 done, 1 failed, 2 bad input, 3 diverged, 130 and 143 stopped."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gramgn.app._folders import forget_sweep, register_resolvers
from gramgn.app._hydra_errors import COMPOSITION_ERRORS, explain, from_hydra
from gramgn.app._repository import absolute, repository, set_repository, shown
from gramgn.app._schema import check_keys, plain
from gramgn.errors import InputError, first_line
from gramgn.progress import say
from gramgn.stopping import StopRequested, raising_signals


@dataclass(frozen=True)
class Outcome:
    """How one job of this process ended, as text and numbers: no error object keeps its tensors alive (H15)."""

    folder: Path
    state: str
    exit_code: int
    message: str
    val_loss: float | None


_outcomes: list[Outcome] = []


def main(task: Callable[[], Any], root: Path) -> int:
    """Run a ``@hydra.main`` function and return the process's exit code.

    Args:
        task: The decorated function; it must call :func:`run_job`.
        root: The repository.
    """
    set_repository(root)
    register_resolvers()
    warnings.formatwarning = _one_line
    _outcomes.clear()
    code = [0]
    with report_errors(code):
        task()
    forget_sweep()
    if len(_outcomes) > 1 or any("sweeps" in outcome.folder.parts for outcome in _outcomes):
        _print_sweep()
        return code[0] or (1 if any(outcome.exit_code in (1, 2) for outcome in _outcomes) else 0)
    return code[0] or max((outcome.exit_code for outcome in _outcomes), default=0)


@contextmanager
def report_errors(code: list[int] | None = None, config_name: str = "train") -> Iterator[None]:
    """Turn an error inside into one message on stderr and an exit code.

    Args:
        code: A list whose first entry is set to the code; without it the process exits with it.
        config_name: The top-level file in ``conf/`` that is composed inside, for hints.
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
    except StopRequested as error:
        exit_code = error.exit_code
        print(str(error), file=sys.stderr)
    except Exception as error:
        if not from_hydra(error):
            raise
        exit_code = 2
        print(f"error: the command line cannot be used: {first_line(error)}", file=sys.stderr)
    if code is not None:
        code[0] = exit_code
    elif exit_code:
        sys.exit(exit_code)


def run_job(config: DictConfig) -> float | None:
    """Do one job of a run or sweep and return its best validation loss, for sweepers that look for one.

    A failure is reported and recorded here and not raised, so that the rest of a sweep goes on.

    Raises:
        StopRequested: If the user or the system asked to stop: that ends the whole sweep.
    """
    from gramgn.app._recording import outcome
    from gramgn.training import release_memory

    folder = _folder(config)
    error: BaseException | None = None
    val_loss: float | None = None
    try:
        record = _do(config, folder)
        state, exit_code = record["state"], 3 if record["state"] == "diverged" else 0
        reason = (record.get("error") or {}).get("message", "")
        val_loss = (record.get("best") or {}).get("val_loss")
    except BaseException as raised:
        error = raised
        state, exit_code = outcome(raised)
        reason = str(raised)
    _outcomes.append(Outcome(folder, state, exit_code, reason, val_loss))
    _remove_if_empty(folder)
    if error is not None:
        if not isinstance(error, Exception):
            raise error
        _report(error)
    del error
    release_memory()
    return val_loss


def prepare_config(overrides: list[str]) -> dict[str, Any]:
    """Compose and check ``conf/prepare.yaml``: a data set, ``image_size`` and ``archive``."""
    config = plain(compose_config(overrides, "prepare"))
    check_keys("", config, ("dataset", "image_size", "archive", "recipe"))
    return config


def _do(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Train a new run, go on with a stopped one, or keep a finished job of the same sweep; return run.json."""
    from hydra.core.hydra_config import HydraConfig

    from gramgn.app._job import train
    from gramgn.app._plan import Job, resumed_job
    from gramgn.tracking.records import RunFolder

    hydra_config = HydraConfig.get()
    container, overrides = plain(config), [str(override) for override in hydra_config.overrides.task]
    if container.get("resume") is not None:
        return train(resumed_job(container, overrides, folder))
    group = folder.parent.name if _is_sweep() else None
    if group and RunFolder(folder).run_json.exists():
        stored = RunFolder(folder).read_run()
        if stored["state"] in ("done", "diverged"):
            say(f"kept: {shown(folder)} is {stored['state']} already")
            return stored
        return train(resumed_job(container, [], folder))
    choices = {str(name): str(choice) for name, choice in hydra_config.runtime.choices.items()}
    choices = {name: choice for name, choice in choices.items() if not name.startswith("hydra")}
    return train(Job(config=container, choices=choices, overrides=overrides, folder=folder, group=group))


def _folder(config: DictConfig) -> Path:
    from hydra.core.hydra_config import HydraConfig

    resume = config.get("resume")
    return absolute(resume) if isinstance(resume, str) else Path(HydraConfig.get().runtime.output_dir)


def _is_sweep() -> bool:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def _remove_if_empty(folder: Path) -> None:
    """Take away the folder that Hydra made for a job that was refused before it began."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _report(error: Exception) -> None:
    """Show the user's own errors as one message, and a bug, ours or that of a plugged-in class, in full."""
    if isinstance(error, InputError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """Show a warning as what it says; the place in our code is of no use to its reader."""
    return f"warning: {message}\n"


def _print_sweep() -> None:
    print(f"\n{len(_outcomes)} jobs in {shown(_outcomes[0].folder.parent)}", file=sys.stderr)
    for outcome in _outcomes:
        loss = f"best val loss {outcome.val_loss:.4g}" if outcome.val_loss is not None else ""
        reason = outcome.message.splitlines()[0] if outcome.message else loss
        print(f"  {outcome.state:<12} {outcome.folder.name}  {reason}", file=sys.stderr)


def compose_config(overrides: list[str], config_name: str = "train") -> DictConfig:
    """Compose ``conf/<config_name>.yaml`` with overrides, for scripts."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(repository() / "conf"), version_base="1.3"):
        return compose(config_name, overrides=overrides)
