"""Where the damping pulls the step to: not to 0, but to a part of the last step, and of -w."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gramgn.optim._damping import Damping


def shift(
    params: Sequence[Tensor],
    previous: Sequence[Tensor | None],
    groups: Sequence[int],
    damping: Damping,
    momentum: float,
) -> list[Tensor] | None:
    """Return s = (alpha mu d_previous - wd w) / (alpha + wd) in new tensors, or None where s = 0.

    alpha/2 |d - mu d_previous|^2 + wd/2 |w + d|^2 is (alpha + wd)/2 |d - s|^2 and a constant, so momentum
    (SPRING, arXiv 2401.10190, section 3) and weight decay inside of the solve are one shift, not the sum of two.
    A group with alpha = wd = 0 has none.

    Args:
        params: w, parameter by parameter.
        previous: The direction of the step before, None where there was none.
        groups: The parameter group of each.
        damping: alpha and wd of each group, in the sum convention.
        momentum: mu.
    """
    betas = damping.betas
    of_previous = [
        momentum * a / beta if beta > 0 else 0.0 for a, beta in zip(damping.alpha, betas, strict=True)
    ]
    of_w = [-wd / beta if beta > 0 else 0.0 for wd, beta in zip(damping.weight_decay, betas, strict=True)]
    terms = [
        (of_w[group], of_previous[group] if d is not None else 0.0)
        for d, group in zip(previous, groups, strict=True)
    ]
    if not any(any(pair) for pair in terms):
        return None
    return [_term(*given) for given in zip(params, previous, *zip(*terms, strict=True), strict=True)]


def _term(w: Tensor, d: Tensor | None, w_factor: float, d_factor: float) -> Tensor:
    """Return w_factor w + d_factor d, with no pass over memory more than that takes."""
    if d is None or not d_factor:
        return w * w_factor if w_factor else torch.zeros_like(w)
    d = d.to(w.device, w.dtype)
    return torch.add(w * w_factor, d, alpha=d_factor) if w_factor else d * d_factor
