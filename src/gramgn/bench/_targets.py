"""What the step is meant to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gramgn.bench._measure import Result, Row

PAPER = "resnet:128x64"
RATIO_ON_CPU = {PAPER: 1.20, "resnet:32x64": 1.12, "resnet:128x32": 1.40, "mlp:128": 1.10}
"""Largest ratio to SGD by shape, on a CPU with two cores in float32."""
RATIO_ON_CUDA = 1.30
AIM_ON_CUDA = 1.15
SHARE_OF_VMAP_MEMORY = 0.7
TIMES_FASTER = {"opacus": 1.7, "backpack": 2.5}
"""How many times faster than a package, at the paper's shape."""
JACOBIANS = 1.2
"""Peak memory at most that of SGD and so many times the size of J."""
DEFAULT_SHAPES = tuple(RATIO_ON_CPU)


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        shape: Where, as it is written on the command line.
        text: What, with the number to reach.
        measured: The number that was measured; None where it was not.
        met: Whether it is reached; None where nothing was measured.
    """

    shape: str
    text: str
    measured: str | None
    met: bool | None

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` or ``not measured``."""
        return "not measured" if self.met is None else "met" if self.met else "missed"


def evaluate(results: Iterable[Result], device_type: str) -> list[Target]:
    """Return every target that speaks of a shape that was measured.

    Ours is our fastest row at the shape (contiguous or channels last); SGD is its fastest row.

    Args:
        results: What was measured.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    targets: list[Target] = []
    for result in results:
        ours, name = result.fastest_of_ours(), result.shape.text
        if name not in RATIO_ON_CPU or ours is None:
            continue
        if device_type == "cpu":
            targets.append(_at_most(result, "time / SGD's", RATIO_ON_CPU[name], _ratio(ours)))
        elif name == PAPER:
            targets += _on_cuda(result, ours)
        targets += _against_others(result, ours)
    return targets


def _against_others(result: Result, ours: Row) -> list[Target]:
    vmap, sgd = result.row("vmap"), result.row(result.reference)
    targets = [
        _at_most(result, "time / vmap(grad)'s", 1.0, _over(_time(ours), _time(vmap))),
        _at_most(result, "peak memory / vmap(grad)'s", SHARE_OF_VMAP_MEMORY, _over(_peak(ours), _peak(vmap))),
    ]
    own, of_sgd = _peak(ours), _peak(sgd)
    beyond = None if own is None or of_sgd is None else (own - of_sgd) / result.jacobian_mib
    targets.append(_at_most(result, "peak memory - SGD's, in sizes of J", JACOBIANS, beyond))
    if result.shape.text == PAPER:
        for name, times in TIMES_FASTER.items():
            row = result.row(name)
            label = next((r.path.label for r in result.rows if r.path.name == name), name)
            faster = _over(_time(row), _time(ours))
            met = None if faster is None else faster >= times
            shown = None if faster is None else f"{faster:.2f}"
            targets.append(
                Target(result.shape.text, f"{label}'s time / ours at least {times:.2f}", shown, met)
            )
    return targets


def _on_cuda(result: Result, ours: Row) -> list[Target]:
    """Return the targets for both eager and both captured; the aim beside the bound."""
    captured = _over(_time(result.fastest_of_ours(graph=True)), _time(result.row("sgd-graph")))
    return [
        _at_most(result, f"{kind} {text}", bound, measured)
        for kind, measured in (("eager", _ratio(ours)), ("captured", captured))
        for text, bound in (("time / SGD's", RATIO_ON_CUDA), ("aim: time / SGD's", AIM_ON_CUDA))
    ]


def _at_most(result: Result, what: str, bound: float, measured: float | None) -> Target:
    text = f"{what} at most {bound:.2f}"
    if measured is None:
        return Target(result.shape.text, text, None, None)
    return Target(result.shape.text, text, f"{measured:.2f}", measured <= bound)


def _ratio(row: Row) -> float | None:
    return row.ratio.median if row.ratio else None


def _time(row: Row | None) -> float | None:
    return row.step_s.median if row and row.step_s else None


def _peak(row: Row | None) -> float | None:
    return row.peak_mib if row else None


def _over(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def num_missed(targets: Sequence[Target]) -> int:
    """Return how many targets were measured and not reached."""
    return sum(target.met is False for target in targets)
