"""SPRING momentum (arXiv 2401.10190) and weight decay inside the solve, as the one shift that both are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gramgn.optim.settings import Damping


def shift(
    params: Sequence[Tensor],
    previous: Sequence[Tensor | None],
    groups: Sequence[int],
    damping: Damping,
    momentum: float,
) -> list[Tensor] | None:
    """Return s = (alpha mu d_previous - wd w) / (alpha + wd) in new tensors, or None where s = 0.

    SPRING (arXiv 2401.10190, section 3) pulls the step d to mu d_previous instead of to 0, weight decay pulls it to
    -w. Because alpha/2 |d - mu d_previous|^2 + wd/2 |w + d|^2 is (alpha + wd)/2 |d - s|^2 plus a constant, the two
    are one shift, not the sum of two. A group with alpha = wd = 0 has none.
    """
    # alpha mu / (alpha + wd) and -wd / (alpha + wd) of each group
    of_previous = [
        momentum * alpha / total if total > 0 else 0.0
        for alpha, total in zip(damping.alpha, damping.total, strict=True)
    ]
    of_w = [
        -wd / total if total > 0 else 0.0
        for wd, total in zip(damping.weight_decay, damping.total, strict=True)
    ]
    factors = [
        (of_w[group], of_previous[group] if d is not None else 0.0)
        for d, group in zip(previous, groups, strict=True)
    ]
    if not any(any(pair) for pair in factors):
        return None
    return [_term(*given) for given in zip(params, previous, *zip(*factors, strict=True), strict=True)]


def _term(w: Tensor, d: Tensor | None, w_factor: float, d_factor: float) -> Tensor:
    """Return w_factor w + d_factor d with as few passes over memory as possible."""
    if d is None or not d_factor:
        return w * w_factor if w_factor else torch.zeros_like(w)
    d = d.to(w.device, w.dtype)
    return torch.add(w * w_factor, d, alpha=d_factor) if w_factor else d * d_factor
