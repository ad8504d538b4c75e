"""The ratios to SGD that our step should reach, and what a result says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.breakdown import PARTS
from benchmarks.measure import Result, Row
from benchmarks.paths import OURS

MEMORY = 1.1
"""The greatest peak memory beyond SGD's, in sizes of J."""
LEAST_JACOBIAN_MIB = 32
"""A smaller J is lost in the noise of a process's resident size."""


@dataclass(frozen=True)
class Target:
    """The greatest ratio to SGD at one shape.

    Attributes:
        ratio: With compiled kernels.
        without: Without them.
        without_on_amd: Without them on an AMD processor, whose library products are slower; None: the same.
    """

    ratio: float
    without: float
    without_on_amd: float | None = None

    def of(self, row: Row, processor: str) -> float:
        """Return the target of a row of ours, with or without kernels."""
        if row.kernels:
            return self.ratio
        return self.without_on_amd if self.without_on_amd and "AMD" in processor else self.without


TARGETS: Mapping[str, Target] = {
    "resnet:128x64": Target(0.95, 1.30),
    "resnet:32x64": Target(1.00, 1.30),
    "resnet:128x32": Target(1.15, 1.60, 1.90),
    "resnet14:128x32": Target(1.20, 1.90),
    "resnet18_gn:64x64": Target(1.10, 1.50),
    "mlp:128": Target(1.08, 1.10),
    "mlp3x64:128": Target(4.0, 4.0),
}


def met(value: float, target: float) -> bool:
    """Return whether a ratio, to two decimals, is no greater than its target."""
    return round(value, 2) <= target


def memory_in_jacobians(result: Result, row: Row) -> float | None:
    """Return the peak memory of a path beyond SGD's in sizes of J; None if J is small or it was not measured."""
    sgd = result.row("sgd")
    if (
        result.jacobian_mib < LEAST_JACOBIAN_MIB
        or sgd is None
        or sgd.peak_mib is None
        or row.peak_mib is None
    ):
        return None
    return (row.peak_mib - sgd.peak_mib) / result.jacobian_mib


def shortfalls(results: Sequence[Result], processor: str) -> list[str]:
    """Return a sentence for every target that is missed, and for every path of others that is faster than ours."""
    found = []
    for result in results:
        target = TARGETS.get(result.shape.text)
        for row in map(result.row, OURS):
            if row is None or row.ratio is None:
                continue
            ratio, who = row.ratio.median, f"{result.shape.text}, {row.path.label}"
            if target and not met(ratio, target.of(row, processor)):
                text = f"{who}: {ratio:.2f} instead of {target.of(row, processor):.2f}"
                found.append(text + _shares(result, row.path.name))
            memory = memory_in_jacobians(result, row)
            if memory is not None and not met(memory, MEMORY):
                found.append(f"{who}: memory beyond SGD {memory:.2f} J instead of {MEMORY:.2f}")
            found += [
                f"{who}: {other.path.label} is faster, {other.ratio.median:.2f}"
                for other in result.rows
                if other.path.apart and other.ratio and other.ratio.median < ratio
            ]
    return found


def _shares(result: Result, path: str) -> str:
    """Return the parts of a step in per cent, if it was split."""
    split = result.breakdowns.get(path)
    if split is None:
        return ""
    parts = {part: split.parts[part] for part in PARTS} | {"other": split.other_s}
    return "; " + ", ".join(f"{part} {seconds / split.step_s:.0%}" for part, seconds in parts.items())
