"""Whether a path computes the update that it should: against float64, from the same weights and batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.bench._paths import Path, loop, ours, parameters_of
from gramgn.bench._prepared import Prepared
from gramgn.bench._problem import Problem

LR = 1024.0
"""The step is multiplied by so much (a power of two, so exactly), or rounding it into w would hide its error."""
MOST_ENTRIES = 1 << 22
"""Where J has more entries, a loop over samples in float64 would take minutes."""
CHECKED = 8
SAME = 1e-2
"""A path whose relative error is larger computes something else, not the same with more rounding."""


@dataclass(frozen=True)
class Reference:
    """The update in float64.

    Attributes:
        step: d [m], on the CPU.
        how: How it was computed, in words.
    """

    step: Tensor
    how: str


def reference_step(problem: Problem) -> Reference:
    """Return d in float64: one backward pass for each sample, or streamed where J would be too large.

    The streamed one is compared with the loop on the first 8 samples.
    """
    exact = problem.to(torch.float64)
    if problem.shape.batch * problem.num_params <= MOST_ENTRIES:
        return Reference(
            _moved(loop(exact, 1.0, ""), exact, 1.0), "float64, one backward pass for each sample"
        )
    few = exact.first(min(CHECKED, problem.shape.batch))
    by_loop = _moved(loop(few, 1.0, ""), few, 1.0)
    streamed = _moved(ours(few, 1.0, ""), few, 1.0)
    how = (
        f"float64, streamed; {_relative(streamed, by_loop):.0e} from one backward pass for each sample on "
        f"{few.shape.batch} samples"
    )
    return Reference(_moved(ours(exact, 1.0, ""), exact, 1.0), how)


def relative_error(path: Path, problem: Problem, variant: str, reference: Reference) -> float:
    """Return |d - d64| / |d64| of one step of ``path``, over all parameters."""
    return _relative(_moved(path.build(problem, LR, variant), problem, LR), reference.step)


def _moved(prepared: Prepared, problem: Problem, lr: float) -> Tensor:
    """Return w - w' of one step, over lr, as one vector in float64."""
    prepared.step()
    after = parameters_of(prepared.model)
    changes = [
        (param.detach().double() - after[name].double()).flatten()
        for name, param in problem.model.named_parameters()
    ]
    return torch.cat(changes).cpu() / lr


def _relative(step: Tensor, exact: Tensor) -> float:
    return float((step - exact).norm() / exact.norm())
