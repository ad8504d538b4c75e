"""All that is measured at one shape: time, memory, the error of the update, and where the time goes."""

from __future__ import annotations

import gc
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.breakdown import Breakdown, profile_step
from benchmarks.convolutions import Convolution, time_convolutions
from benchmarks.counts import Counts, count_operations
from benchmarks.packages import LAST, Prepared
from benchmarks.paths import OURS, PATHS, Path, kernels_form, least_memory, loop, ours, parameters_of, sgd
from benchmarks.problem import Problem, Shape, make_problem
from benchmarks.timing import WARM_UP, Spread, interleaved, ratios, repeats, timed
from gramgn.errors import first_line
from gramgn.malloc import give_freed_blocks_back
from gramgn.training import PeakMemory

LR = 2.0**-10
"""The learning rate of timed steps: small, so that the weights hardly move."""
TEST_LR = 2.0**10
"""The learning rate of tested steps: a power of two, exact and so large that rounding into w hides no error."""
MOST_ENTRIES = 1 << 22
"""With more entries in J, a loop over samples in float64 would take minutes."""
CHECKED = 8
TRIALS = 2
"""Number of measurements per variant of a path; the shortest counts."""
SAME = 1e-2
"""A path with a larger relative error computes another update, not the same one with more rounding."""
NUM_STEPS = 3
TINY_IMAGES, TINY_VECTORS = Shape("resnet", 8, 2, 8), Shape("mlp", 8, 2, None)
PRELOADED = ["torch", "torch._dynamo", "benchmarks.measure"]
"""Imports of the parent of the measuring processes; torch's first optimizer step imports _dynamo."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: CPU or CUDA.
        threads: Number of torch's threads.
        rounds: Number of turns of each path.
        limit_s: Time in seconds after which no round of a shape begins.
        memory: Measure the peak memory.
        accuracy: Measure the error against float64.
        breakdown: Split our steps into their parts.
        convolutions: Time the products of the convolutions, layer by layer.
    """

    device: torch.device
    threads: int
    rounds: int
    limit_s: float = math.inf
    memory: bool = True
    accuracy: bool = True
    breakdown: bool = False
    convolutions: bool = False


@dataclass(frozen=True)
class Row:
    """A path at one shape; None stands for what was not measured.

    Attributes:
        path: The path.
        variant: The form in which it ran: the fastest one that computes the right update.
        step_s: Seconds per step.
        ratio: Time relative to SGD in its fastest form.
        peak_mib: Peak memory in MiB.
        error: |d - d64| / |d64|.
        kernels: The form of our compiled kernels in it; empty: none.
        note: Why it did not run, or another remark.
    """

    path: Path
    variant: str = ""
    step_s: Spread | None = None
    ratio: Spread | None = None
    peak_mib: float | None = None
    error: float | None = None
    kernels: str = ""
    note: str = ""


@dataclass(frozen=True)
class Result:
    """All measurements at one shape.

    Attributes:
        shape: The shape.
        num_params: m.
        jacobian_mib: The size of J in float32.
        how: How the update in float64 was computed, or None.
        rows: The paths' results.
        counts: Operation counts.
        breakdowns: The parts of our steps by path.
        convolutions: Times by shape of convolution, in SGD's fastest format.
    """

    shape: Shape
    num_params: int
    jacobian_mib: float
    how: str | None
    rows: tuple[Row, ...]
    counts: Counts
    breakdowns: Mapping[str, Breakdown]
    convolutions: tuple[Convolution, ...] = ()

    def row(self, name: str) -> Row | None:
        """Return the row of a path if its time was measured."""
        return next((row for row in self.rows if row.path.name == name and row.step_s), None)


def measure(shape: Shape, paths: Sequence[Path], settings: Settings, say: Say) -> Result:
    """Measure every path at one shape.

    Args:
        shape: The shape.
        paths: The paths, the first of which is SGD.
        settings: How to measure.
        say: Called with messages on the progress.
    """
    problem = make_problem(shape, settings.device)
    if settings.accuracy:
        say(f"{shape.title}: update in float64")
    reference, how = _reference_step(problem) if settings.accuracy else (None, None)
    fitting = [path for path in paths if path.fits(problem)]
    together, apart = ([path for path in fitting if path.apart == is_apart] for is_apart in (False, True))
    rows, breakdowns = _time(together, None, problem, reference, settings, say)
    base = rows[0]
    if apart:
        rows += _time(apart, base, problem, reference, settings, say)[0]
    convolutions: list[Convolution] = []
    if settings.convolutions and shape.pixels:
        say(f"{shape.title}: convolutions by layer")
        convolutions = time_convolutions(problem, channels_last=LAST in base.variant)
    if settings.memory:
        for i, row in enumerate(rows):
            if row.step_s:
                say(f"{shape.title}: peak memory of {row.path.label}")
                peak = peak_mib(row.path.name, row.variant, shape, settings.device, settings.threads)
                rows[i] = replace(row, peak_mib=peak)
    return Result(
        shape=shape,
        num_params=problem.num_params,
        jacobian_mib=problem.jacobian_bytes / 2**20,
        how=how,
        rows=tuple(rows),
        counts=count_operations(problem.model, problem.x),
        breakdowns=breakdowns,
        convolutions=tuple(convolutions),
    )


def _time(
    paths: Sequence[Path],
    base: Row | None,
    problem: Problem,
    reference: Tensor | None,
    settings: Settings,
    say: Say,
) -> tuple[list[Row], dict[str, Breakdown]]:
    """Time paths in rounds with SGD: the first path, or for paths apart `base`, whose form is known."""
    rows, ready = [], {}
    if base:
        ready[base.path.name] = base.path.build(problem, LR, base.variant)
    for path in paths:
        say(f"{problem.shape.title}: preparing {path.label}")
        row, prepared = _prepare(path, problem, reference)
        rows.append(row)
        if prepared:
            ready[path.name] = prepared
    say(f"{problem.shape.title}: timing {', '.join(ready)}")
    steps = {name: prepared.step for name, prepared in ready.items()}
    seconds = interleaved(steps, settings.device, settings.rounds, settings.limit_s / 2)
    to_sgd = ratios(seconds, next(iter(ready)))
    for i, row in enumerate(rows):
        name = row.path.name
        if name in ready:
            rows[i] = replace(row, step_s=Spread.of(seconds[name]), ratio=to_sgd[name])
    profiled = [name for name in OURS if settings.breakdown and name in ready]
    return rows, {name: profile_step(steps[name], settings.device) for name in profiled}


def _prepare(path: Path, problem: Problem, reference: Tensor | None) -> tuple[Row, Prepared | None]:
    """Return the path in its fastest variant that computes the right update, or why there is none."""
    obstacle = path.obstacle()
    if obstacle:
        return Row(path, note=obstacle), None
    best, row, fastest = math.inf, Row(path), None
    failed: dict[str, list[str]] = {}
    variants, form = path.variants_for(problem), kernels_form(path.kernels, problem.x.device)
    for variant in variants:
        prepared = None
        gc.collect()
        try:
            error = None
            if reference is not None and not path.sgd:
                moved = _moved(path.build(problem, TEST_LR, variant), problem, TEST_LR)
                error = _relative(moved, reference)
                if not error <= SAME:
                    failed.setdefault(f"not this update (relative error {error:.1e})", []).append(variant)
                    continue
            prepared = path.build(problem, LR, variant)
            took = 0.0
            if len(variants) > 1:
                prepared.step()
                in_a_row = repeats(timed(prepared.step, problem.x.device))
                took = min(timed(prepared.step, problem.x.device, in_a_row) for _ in range(TRIALS))
        except Exception as failure:
            if not path.package:
                raise
            # A package may not support a layer, a format or this torch: its row says so, the others continue.
            failed.setdefault(f"{type(failure).__name__}: {first_line(failure)}", []).append(variant)
            continue
        if took < best:
            best, row, fastest = took, Row(path, variant, error=error, kernels=form), prepared
    notes = [f"{' and '.join(of) or path.label}: {why}" for why, of in failed.items()]
    return replace(row, note="; ".join(notes)), fastest


@dataclass(frozen=True)
class Parts:
    """The parts of our step and a step of SGD at one shape in one round.

    Attributes:
        shape: The shape.
        num_params: m.
        turn: The round, counted from 0.
        breakdown: Our step in channels last, split by torch's profiler.
        sgd_s: Seconds of a step of SGD with momentum in channels last.
        counts: Operation counts.
    """

    shape: Shape
    num_params: int
    turn: int
    breakdown: Breakdown
    sgd_s: float
    counts: Counts


def time_parts(shapes: Sequence[Shape], device: torch.device, rounds: int) -> Iterator[Parts]:
    """Split our step at every shape once per round, so that all shapes see the same machine.

    Args:
        shapes: Shapes of ResNets.
        device: CPU or CUDA.
        rounds: Number of rounds.
    """
    problems = [make_problem(shape, device) for shape in shapes]
    our_steps, sgd_steps = ([build(problem, LR, LAST).step for problem in problems] for build in (ours, sgd))
    for step in [*our_steps, *sgd_steps] * WARM_UP:
        step()
    counts = [count_operations(problem.model, problem.x) for problem in problems]
    for turn in range(rounds):
        for place in range(len(problems)):
            i = (turn + place) % len(problems)  # every round begins at another shape, as in `interleaved`
            breakdown = profile_step(our_steps[i], device, num_steps=1)
            sgd_s = timed(sgd_steps[i], device)
            yield Parts(shapes[i], problems[i].num_params, turn, breakdown, sgd_s, counts[i])


def _reference_step(problem: Problem) -> tuple[Tensor, str]:
    """Return d [m] in float64 on the CPU, and in words how it was computed.

    That is by one backward pass per sample, or streamed if J would be too large; the streamed one is compared with
    the loop over the first 8 samples.
    """
    exact = problem.to(torch.float64)
    if problem.shape.batch * problem.num_params <= MOST_ENTRIES:
        return _moved(loop(exact, 1.0, ""), exact, 1.0), "float64, one backward pass per sample"
    few = exact.first(min(CHECKED, problem.shape.batch))
    by_loop = _moved(loop(few, 1.0, ""), few, 1.0)
    streamed = _moved(least_memory(few, 1.0, ""), few, 1.0)
    how = (
        f"float64, streamed; {_relative(streamed, by_loop):.0e} from one backward pass per sample on "
        f"{few.shape.batch} samples"
    )
    return _moved(least_memory(exact, 1.0, ""), exact, 1.0), how


def _moved(prepared: Prepared, problem: Problem, lr: float) -> Tensor:
    """Return (w - w') / lr of one step as one vector in float64."""
    prepared.step()
    after = parameters_of(prepared.model)
    changes = [
        (param.detach().double() - after[name].double()).flatten()
        for name, param in problem.model.named_parameters()
    ]
    return torch.cat(changes).cpu() / lr


def _relative(step: Tensor, exact: Tensor) -> float:
    return float((step - exact).norm() / exact.norm())


def peak_mib(path: str, variant: str, shape: Shape, device: torch.device, threads: int) -> float:
    """Return the peak memory in MiB that three steps need: weights, batch, activations, J and workspaces.

    CUDA: the most that torch's allocator handed out, less what other paths hold. CPU: the largest resident size of a
    fresh process, less its size after steps of the same path on a tiny problem, which load all code. glibc's malloc
    is set to return every larger block as soon as it is freed: by default it keeps more of them the longer a process
    runs, and the peak then shows the holes between blocks, which differ from run to run.

    Args:
        path: The path's name.
        variant: The path's variant.
        shape: The problem.
        device: CPU or CUDA.
        threads: Number of torch's threads.
    """
    if device.type == "cuda":
        return _peak_of_steps(path, variant, shape, device)
    # A fork of a process that has imported torch but never run it: as fresh as a new one, without its imports.
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_in_fresh_process, path, variant, shape.text, threads).result()


def _in_fresh_process(path: str, variant: str, shape: str, threads: int) -> float:
    give_freed_blocks_back()
    warnings.simplefilter("ignore")  # they are shown where the path is timed
    torch.set_num_threads(threads)
    whole, cpu = Shape.parse(shape), torch.device("cpu")
    _peak_of_steps(path, variant, TINY_IMAGES if whole.pixels else TINY_VECTORS, cpu)
    return _peak_of_steps(path, variant, whole, cpu)


def _peak_of_steps(path: str, variant: str, shape: Shape, device: torch.device) -> float:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = PeakMemory(device)
    held = memory.mib()
    prepared = PATHS[path].build(make_problem(shape, device), LR, variant)
    for _ in range(NUM_STEPS):
        prepared.step()
    return memory.mib() - held
