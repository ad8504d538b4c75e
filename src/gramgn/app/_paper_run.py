"""Running the paper's chain: one ``train.py`` process after another, to be stopped and gone on with at any time."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gramgn.app._build import build_dataset
from gramgn.app._lock import take_lock
from gramgn.app._main import compose_config
from gramgn.app._paper import Chain, Step
from gramgn.app._paper_state import Progress, duration, headline, progress, table
from gramgn.app._repository import repository, shown
from gramgn.app._schema import TrackingConfig, check_entries, plain, run_entries
from gramgn.errors import ConfigError, DataError, InputError
from gramgn.progress import say
from gramgn.stopping import StopRequested

OWN_KEYS = (
    "name",
    "seed",
    "dataset",
    "trainer",
    "trainer.epochs",
    "experiment",
    "sweep",
    "init_from",
    "resume",
)
STOP_WAIT_S = 20.0  # a stopped train.py saves checkpoints; then it is killed
LOCK_WAIT_S = 20.0  # a killed chain's train.py needs a moment to notice
STOPPED = {128 + signum: signum for signum in (signal.SIGINT, signal.SIGTERM)}  # exit codes

Call = Callable[[Sequence[str]], int]


def check_overrides(extra: Sequence[str]) -> None:
    """Refuse overrides that the chain makes itself.

    Raises:
        ConfigError: For such a one, or for a word that is no override.
    """
    for word in extra:
        key, is_override, _ = word.lstrip("+~").partition("=")
        if not is_override:
            raise ConfigError(f"{word!r} is no override; write key=value, e.g. trainer.device=cuda")
        if key in OWN_KEYS or key.startswith(("warm_start.", "best_alpha.", "scale.")):
            raise ConfigError(
                f"{word}: the chain sets {key} itself, differently for its steps; choose with --scale and --data, "
                "or run a step of your own with train.py"
            )


def missing_data(chain: Chain) -> dict[str, str]:
    """Return what is wrong with the data sets of a chain, by their ``dataset=`` choice; also check the overrides.

    Raises:
        InputError: An override is wrong, or not one data set can be used.
    """
    wrong: dict[str, str] = {}
    names = list(dict.fromkeys(chain.dataset(step) for step in chain.steps))
    for name in names:
        config = run_entries(
            plain(compose_config([f"dataset={name}", f"trainer={chain.scale.name}", *chain.extra]))
        )
        if chain.extra:  # not without: the check needs torch, and conf/ itself is right
            check_entries(config)
            TrackingConfig(**config["tracking"])
        dataset = build_dataset(config["dataset"])
        try:
            dataset.check(config["trainer"]["image_size"])
        except DataError as error:
            wrong[name] = str(error)
    if len(wrong) == len(names):
        raise DataError("\n".join(wrong.values()) + "\nOr run the chain on stand-ins: --data synthetic")
    return wrong


def list_chain(chain: Chain) -> str:
    """Return the steps and their state, from the records."""
    states = _states(chain)
    return f"{table(chain, states)}\n{headline(chain, states)}"


def run_chain(chain: Chain, call: Call | None = None) -> int:
    """Run every step that can be run, and say at the end which could not.

    Each is a ``train.py`` sweep, which keeps its finished jobs after comparing their configuration, so that the
    same command goes on where it stopped.

    Args:
        chain: What to run.
        call: Runs ``train.py`` with arguments and returns its exit code; another one is for tests.

    Returns:
        0 if all steps were run and no job failed, else 1.

    Raises:
        InputError: The chain runs already, or nothing of it can be run.
        StopRequested: It was asked to stop; ``train.py`` has ended by then.
    """
    unavailable = missing_data(chain)
    with _lock(chain) as descriptor:
        states = _states(chain)
        say(f"{headline(chain, states)}\n{table(chain, states)}")
        for name, message in unavailable.items():
            say(f"dataset={name} cannot be used, so its steps are left out: {message}")
        run = call or (lambda arguments: _train(arguments, descriptor))
        start = time.monotonic()
        try:
            troubles = _run_steps(chain, unavailable, run)
        except StopRequested:
            say("the same command goes on where the chain stopped")
            raise
        say(f"\n{table(chain, _states(chain))}")
        say(f"the chain has ended after {duration(time.monotonic() - start)}")
    for name, trouble in troubles.items():
        say(f"  {name}: {trouble}")
    if troubles:
        say("mend what is named above and give the same command: it goes on with what is missing")
    say("draw the figures with: make figures\nwrite the report with: make report")
    return 1 if troubles else 0


def _run_steps(chain: Chain, unavailable: dict[str, str], call: Call) -> dict[str, str]:
    """Run the steps in order; return what went wrong, by the step's name."""
    troubles: dict[str, str] = {}
    for number, step in enumerate(chain.steps, start=1):
        title = f"[{number}/{len(chain.steps)}] {step.name} (figures {step.figures})"
        if chain.dataset(step) in unavailable:
            troubles[step.name] = f"left out, dataset={chain.dataset(step)} cannot be used"
        elif step.grid in troubles:
            troubles[step.name] = f"left out, it needs {step.grid}, which is not complete"
        else:
            seeds, why, is_trouble = _seeds(chain, step)
            if why:
                say(f"\n{title}: {why}")
            if is_trouble:
                troubles[step.name] = why
            if seeds:
                _run_step(chain, step, seeds, title, call, troubles)
            continue
        say(f"\n{title}: {troubles[step.name]}")
    return troubles


def _run_step(
    chain: Chain, step: Step, seeds: Sequence[int], title: str, call: Call, troubles: dict[str, str]
) -> None:
    arguments = chain.arguments(step, seeds)
    say(f"\n{title}\npython train.py {shlex.join(arguments)}")
    code = call(arguments)
    if code in STOPPED:
        raise StopRequested(STOPPED[code])
    if code != 0:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        troubles[step.name] = f"train.py {how}"
        say(f"{title}: train.py {how}; going on with the steps that do not need it")


def _seeds(chain: Chain, step: Step) -> tuple[list[int], str, bool]:
    """Return the seeds that have a network to start from, why others have none, and whether that is a trouble.

    A run that diverged is an outcome: its seed is missing from then on, which is one only if no seed is left.
    """
    if step.warm_start is None:
        return list(step.seeds), "", False
    source = next(each for each in chain.steps if each.name == step.warm_start)
    found = progress(chain, source, _sweeps())
    seeds = [seed for seed in step.seeds if seed in found.done_seeds]
    diverged = [seed for seed in step.seeds if seed in found.diverged_seeds]
    lost = [seed for seed in step.seeds if seed not in seeds and seed not in diverged]
    parts = []
    if diverged:
        parts.append(
            f"its run{'s' * (len(diverged) > 1)} of {_named(diverged)} diverged: nothing can start from that"
        )
    if lost:
        parts.append(f"it has no finished run of {_named(lost)}")
    if not parts:
        return seeds, "", False
    what = f"only {_named(seeds)}" if seeds else "left out"
    return seeds, f"{what}: it starts from {source.name}; {'; '.join(parts)}", bool(lost) or not seeds


def _named(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _states(chain: Chain) -> list[Progress]:
    return [progress(chain, step, _sweeps()) for step in chain.steps]


def _sweeps() -> Path:
    return repository() / "outputs" / "sweeps"


def _train(arguments: Sequence[str], descriptor: int) -> int:
    """Run ``train.py`` and return its exit code; a signal is passed on to it once, and it is waited for.

    It gets a session of its own, because Ctrl-C on a terminal reaches a whole process group and ``train.py``
    would take a second signal as an order to drop everything.
    """
    process = subprocess.Popen(
        [sys.executable, str(repository() / "train.py"), *arguments],
        cwd=repository(),
        stdin=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,
        preexec_fn=_end_with_parent(),
    )
    try:
        return process.wait()
    except StopRequested as stop:
        say("stopping train.py")
        process.send_signal(stop.signum)
        try:
            process.wait(timeout=STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls to be sent SIGTERM when we are killed; None where the system cannot do that."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
    set_parent_death_signal = 1

    def ask() -> None:
        prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # we were killed before it asked
            os._exit(128 + signal.SIGTERM)

    return ask


@contextmanager
def _lock(chain: Chain) -> Iterator[int]:
    """Hold the chain for this process; its ``train.py`` inherits the hold, and so outlives a killed chain's.

    Raises:
        InputError: Another process runs the same chain.
    """
    file = _sweeps() / f".{chain.name}.lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {shown(file.parent)}: {error.strerror or error}") from error
    descriptor = take_lock(file, f"this chain ({chain.name})", LOCK_WAIT_S)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
