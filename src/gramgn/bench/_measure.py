"""All that is measured at one shape."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gramgn.bench._accuracy import SAME, Reference, reference_step, relative_error
from gramgn.bench._breakdown import Breakdown, profile_step
from gramgn.bench._floor import Floor, count_floor
from gramgn.bench._kernels import Kernels, time_kernels
from gramgn.bench._memory import LR, peak_mib
from gramgn.bench._paths import Path
from gramgn.bench._prepared import Prepared
from gramgn.bench._problem import Problem, Shape, make_problem
from gramgn.bench._timing import Spread, interleaved, ratios, timed
from gramgn.errors import first_line

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: CPU or CUDA.
        threads: torch's threads.
        rounds: How often each path takes its turn.
        limit_s: No round of a shape is begun after so many seconds.
        memory: Measure the peak memory.
        accuracy: Measure the error against float64.
        breakdown: Split our step into its parts.
        kernels: Time the kernels of the convolutions.
        default_malloc: Measure the peak memory with malloc as it is, holes and all.
    """

    device: torch.device
    threads: int
    rounds: int
    limit_s: float = math.inf
    memory: bool = True
    accuracy: bool = True
    breakdown: bool = False
    kernels: bool = False
    default_malloc: bool = False


@dataclass(frozen=True)
class Row:
    """A path at one shape. What was not measured is None.

    Attributes:
        path: Which.
        variant: The form in which it ran, the fastest one that computes the right update.
        step_s: Seconds of a step.
        ratio: To SGD in its fastest format.
        peak_mib: Peak memory.
        error: |d - d64| / |d64|.
        note: Why it did not run, or what else is to be said.
    """

    path: Path
    variant: str = ""
    step_s: Spread | None = None
    ratio: Spread | None = None
    peak_mib: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Result:
    """What was measured at one shape.

    Attributes:
        shape: Which.
        num_params: m.
        jacobian_mib: The size of J in float32.
        reference: The name of the SGD path that the ratios refer to.
        how: How the update in float64 was computed; None if it was not.
        rows: The paths.
        floor: Operation counts.
        breakdown: Of our fastest eager path.
        breakdown_of: That path's name.
        kernels: Of each shape of convolution, as SGD's fastest format has it.
    """

    shape: Shape
    num_params: int
    jacobian_mib: float
    reference: str
    how: str | None
    rows: tuple[Row, ...]
    floor: Floor
    breakdown: Breakdown | None = None
    breakdown_of: str = ""
    kernels: tuple[Kernels, ...] = ()

    def row(self, name: str) -> Row | None:
        """Return the row of a path if its time was measured."""
        return next((row for row in self.rows if row.path.name == name and row.step_s), None)

    def fastest_of_ours(self, graph: bool = False) -> Row | None:
        """Return our fastest row by median."""
        mine = [row for row in self.rows if row.path.ours and row.path.graph == graph and row.step_s]
        return min(mine, key=_median, default=None)


def measure(shape: Shape, paths: Sequence[Path], settings: Settings, say: Say) -> Result:
    """Measure every path at one shape.

    Args:
        shape: Which.
        paths: The paths, an SGD path among them.
        settings: How to measure.
        say: Is told what is being done.
    """
    problem = make_problem(shape, settings.device)
    if settings.accuracy:
        say(f"{shape.title}: update in float64")
    reference = reference_step(problem) if settings.accuracy else None
    rows, ready = _prepared_rows([path for path in paths if path.fits(problem)], problem, reference, say)
    say(f"{shape.title}: timing {', '.join(ready)}")
    seconds = interleaved(
        {name: prepared.step for name, prepared in ready.items()},
        settings.device,
        settings.rounds,
        settings.limit_s,
    )
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    sgd = [row.path.name for row in rows if row.path.sgd and not row.path.graph and row.path.name in spreads]
    base = min(sgd, key=lambda name: spreads[name].median)
    of_sgd = ratios(seconds, base)
    rows = [replace(row, step_s=spreads.get(row.path.name), ratio=of_sgd.get(row.path.name)) for row in rows]
    result = Result(
        shape=shape,
        num_params=problem.num_params,
        jacobian_mib=problem.jacobian_bytes / 2**20,
        reference=base,
        how=reference.how if reference else None,
        rows=tuple(rows),
        floor=count_floor(problem.model, problem.x),
    )
    fastest = result.fastest_of_ours()
    if settings.breakdown and fastest:
        breakdown = profile_step(ready[fastest.path.name].step, settings.device)
        result = replace(result, breakdown=breakdown, breakdown_of=fastest.path.name)
    ready.clear()
    if settings.kernels and shape.pixels:
        say(f"{shape.title}: kernels of the convolutions")
        result = replace(result, kernels=tuple(time_kernels(problem, channels_last=base == "sgd-cl")))
    if settings.memory:
        result = replace(result, rows=tuple(_with_memory(row, shape, settings, say) for row in rows))
    return result


def _prepared_rows(
    paths: Sequence[Path], problem: Problem, reference: Reference | None, say: Say
) -> tuple[list[Row], dict[str, Prepared]]:
    """Return a row for each path, and those that can run, ready to."""
    rows, ready = [], {}
    for path in paths:
        obstacle = path.obstacle()
        if obstacle:
            rows.append(Row(path, note=obstacle))
            continue
        say(f"{problem.shape.title}: preparing {path.label}")
        row, prepared = _prepare(path, problem, reference)
        rows.append(row)
        if prepared:
            ready[path.name] = prepared
    return rows, ready


def _prepare(path: Path, problem: Problem, reference: Reference | None) -> tuple[Row, Prepared | None]:
    """Return the path in its fastest variant that computes the right update, or the reason why there is none."""
    candidates: list[tuple[float, Row, Prepared]] = []
    notes = []
    variants = path.variants_for(problem)
    for variant in variants:
        try:
            error = None
            if reference and not path.sgd:
                error = relative_error(path, problem, variant, reference)
                if not error <= SAME:
                    notes.append(f"{variant or path.label}: not this update (relative error {error:.1e})")
                    continue
            prepared = path.build(problem, LR, variant)
            took = math.nan
            if len(variants) > 1:
                prepared.step()
                took = timed(prepared.step, problem.x.device)
        except Exception as failure:
            if not path.package:
                raise
            # A package may not know a layer, a format or this torch: its row says so, the others go on.
            notes.append(f"{variant or path.label}: {type(failure).__name__}: {first_line(failure)}")
            continue
        candidates.append((took, Row(path, variant, error=error), prepared))
    gc.collect()
    if not candidates:
        return Row(path, note="; ".join(notes)), None
    _, row, prepared = min(candidates, key=lambda candidate: candidate[0])
    return replace(row, note="; ".join(notes)), prepared


def _with_memory(row: Row, shape: Shape, settings: Settings, say: Say) -> Row:
    if row.step_s is None:
        return row
    say(f"{shape.title}: peak memory of {row.path.label}")
    peak = peak_mib(
        row.path.name, row.variant, shape, settings.device, settings.threads, settings.default_malloc
    )
    return replace(row, peak_mib=peak)


def _median(row: Row) -> float:
    assert row.step_s is not None
    return row.step_s.median
