"""Algorithm 1 of arXiv 1905.11675: one step on one mini-batch.

With the residuals r = f - y of b samples (n = b k rows for k outputs) and their Jacobian J with respect to the m
trainable parameters w, the paper's step is::

    G = J J^T                              the Gram matrix, n x n
    (lam G + alpha I) u = r                the linear system
    w <- w - J^T u                         the update

The optimizer's options generalise it by one shift s, one weight per parameter group and step sizes lr::

    G = sum_g weight_g J_g J_g^T
    (lam G + damping I) u = r + lam J s
    d_g = s_g - weight_g J_g^T u
    w_g <- w_g + lr_g d_g

This d minimises lam/2 |J d + r / lam|^2 + sum_g damping_g/2 |d_g - s_g|^2, in which damping_g = alpha_g + wd_g is what
group g adds to the diagonal in total, `damping` that of the first group and weight_g = damping / damping_g. The shift s
(`spring.shift`) holds SPRING's momentum and the weight decay wd. For one group the weight is 1; without momentum and
weight decay s = 0 and damping = alpha; with lr = 1 this is the paper's step. alpha, wd and damping are all in the sum
convention here; `gramgn.damping` converts to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.optim.closure import Trained
from gramgn.optim.gram import Linearisation
from gramgn.optim.runtime import by_group, norms, span
from gramgn.optim.settings import Damping, Settings
from gramgn.optim.solve import NON_FINITE, Solution, SolveError, solve_system
from gramgn.optim.spring import shift


@dataclass(frozen=True)
class LinearModel:
    """The linear model of one batch, r + J d."""

    J: Linearisation
    trained: Trained  # the parameters, m entries in total
    G_by_group: Tensor  # J_g J_g^T of each parameter group, [groups, n, n] in float64
    G: Tensor  # their sum J J^T [n, n]
    trace: float  # of G
    r: Tensor  # [n] in float64, on the device of G
    previous: Sequence[
        Tensor | None
    ]  # the direction of the previous step by parameter; None where there was none
    number: int  # of the step, for messages

    @property
    def params(self) -> list[Tensor]:
        """The parameters w."""
        return list(self.trained.params.values())


@dataclass(frozen=True)
class Step:
    """A proposed step w_g <- w_g + lr_g d_g."""

    settings: Settings
    damping: Damping  # alpha and wd in the sum convention
    solution: Solution
    lr: tuple[float, ...]  # of each group, shortened where the step was too long
    direction: (
        list[Tensor] | None
    )  # d by parameter; None: d = -weight_g J_g^T u is proved finite, but not formed
    change: Tensor  # J diag(lr) d [n], which the linear model adds to the residuals
    norm: float  # |diag(lr) d|
    finite: bool  # whether there is such a step


def linear_model(
    J: Linearisation, trained: Trained, previous: Sequence[Tensor | None], number: int
) -> LinearModel:
    """Return the linear model of a batch with Jacobian `J`; see `LinearModel`."""
    # G = J J^T = sum_g J_g J_g^T
    G_by_group = J.gram()
    G = G_by_group[0] if len(G_by_group) == 1 else G_by_group.sum(dim=0)
    r = J.reading.residual.flatten().to(G.device).to(G.dtype)
    return LinearModel(J, trained, G_by_group, G, float(G.trace()), r, previous, number)


def propose(model: LinearModel, settings: Settings, *, explicit: bool) -> Step:
    """Solve the linear system of a batch. `explicit`: form d even where J^T u can be added directly.

    Raises:
        SolveError: No solution was found.
    """
    J, r, lam, lr = model.J, model.r, settings.lam, settings.lr
    damping = settings.damping(J.num_samples, mean_eigenvalue=model.trace / len(r))

    # s = (alpha mu d_previous - wd w) / (alpha + wd); None for s = 0
    s = shift(model.params, model.previous, model.trained.groups, damping, settings.momentum)
    Js = None if s is None else J.jvp(s)
    with span("gramgn.solve"):
        # (lam G + damping I) u = r + lam J s
        G = _weighted_gram(model, damping.weights)
        rhs = r if Js is None else r + lam * Js
        solution = _solve(G, rhs, lam, damping.of_system, J.eps, model.number)
    u = solution.u
    if solution.status == NON_FINITE:
        return Step(settings, damping, solution, lr, None, torch.full_like(rhs, math.nan), math.nan, False)

    # J diag(lr) d = J diag(lr) s - sum_g lr_g weight_g G_g u
    Gu = model.G_by_group @ u
    scales = [lr_g * weight for lr_g, weight in zip(lr, damping.weights, strict=True)]
    change = -sum(scale * row for scale, row in zip(scales, Gu, strict=True))
    if s is not None and Js is not None:
        change = change + _change_by_shift(model, lr, s, Js)

    norm = (
        _norm_without_direction(model, u, Gu, scales) if _may_skip(s, solution, settings, explicit) else None
    )
    d = None
    if norm is None:
        with span("gramgn.update"):
            # d_g = s_g - weight_g J_g^T u
            d = [torch.zeros_like(w) for w in model.params] if s is None else s
            J.add_vjp_(d, u, [-damping.weights[group] for group in model.trained.groups])
            norm = _norm(d, model.trained, lr)
    finite = norm <= _largest(model.params)
    if settings.max_step_norm is not None and finite and norm > settings.max_step_norm:
        shorter = settings.max_step_norm / norm
        lr, change, norm = tuple(shorter * lr_g for lr_g in lr), shorter * change, settings.max_step_norm
    return Step(settings, damping, solution, lr, d, change, norm, finite)


def add_step_(model: LinearModel, step: Step, fraction: float = 1.0) -> None:
    """Add a fraction of the step to the parameters, after decoupled weight decay, if there is any.

    Decoupled decay is w <- (1 - lr wd) w with the configured lr (Loshchilov and Hutter 2019, AdamW).
    """
    J, w, groups, settings = model.J, model.params, model.trained.groups, step.settings
    with span("gramgn.update"):
        if settings.decoupled_weight_decay and any(settings.weight_decay):
            kept = [1 - lr * wd for lr, wd in zip(settings.lr, settings.weight_decay, strict=True)]
            torch._foreach_mul_(w, [kept[group] for group in groups])
        if step.direction is None:
            # w <- w - lr J^T u
            scales = [
                -fraction * lr * weight for lr, weight in zip(step.lr, step.damping.weights, strict=True)
            ]
            J.add_vjp_(w, step.solution.u, [scales[group] for group in groups])
            return
        for group in sorted(set(groups)):
            # w <- w + lr d
            members = [i for i, other in enumerate(groups) if other == group]
            torch._foreach_add_(
                [w[i] for i in members],
                [step.direction[i] for i in members],
                alpha=fraction * step.lr[group],
            )


def _weighted_gram(model: LinearModel, weights: Sequence[float]) -> Tensor:
    """Return G = sum_g weight_g J_g J_g^T; J J^T where all weights are 1."""
    if set(weights) == {1.0}:
        return model.G
    G = model.G_by_group
    return torch.tensordot(torch.tensor(weights, dtype=G.dtype).to(G.device), G, 1)


def _solve(G: Tensor, rhs: Tensor, lam: float, damping: float, eps: float, number: int) -> Solution:
    """Solve (lam G + damping I) u = rhs; where that fails, describe the system in the error."""
    try:
        return solve_system(G, rhs, lam, damping, eps)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        condition = 1 + lam * float(torch.linalg.matrix_norm(G)) / damping if damping > 0 else math.inf
        raise SolveError(
            f"step {number}: the system lam G + alpha I could not be solved (lam {lam:g}, alpha {damping:g} in the "
            f"sum convention, batch size {len(G)} rows, condition number up to {condition:.1e}); no parameter was "
            f"changed. Raise alpha. {error}"
        ) from error


def _change_by_shift(model: LinearModel, lr: Sequence[float], s: Sequence[Tensor], Js: Tensor) -> Tensor:
    """Return J diag(lr) s, from J s where all lr are equal."""
    groups = model.trained.groups
    if len({lr[group] for group in groups}) == 1:
        return lr[groups[0]] * Js
    return model.J.jvp([lr[group] * term for group, term in zip(groups, s, strict=True)])


def _may_skip(s: list[Tensor] | None, solution: Solution, settings: Settings, explicit: bool) -> bool:
    """Return whether J^T u may be added to the parameters without forming d first.

    Not where d has another term or is kept for momentum, nor where G's small end is rounding, so that u^T G u is no
    norm of d. Nor with decoupled weight decay, which changes w before the step is added: an engine that goes backward
    again needs w as it was.
    """
    decays = settings.decoupled_weight_decay and any(settings.weight_decay)
    return not (s is not None or explicit or settings.momentum or solution.ill_conditioned or decays)


def _norm_without_direction(
    model: LinearModel, u: Tensor, Gu: Tensor, scales: Sequence[float]
) -> float | None:
    """Return |diag(lr) d| = sqrt(sum_g scale_g^2 u^T G_g u), or None where an entry of d might overflow.

    |J_ij| <= sqrt(G_ii), so no partial sum of J_g^T u exceeds sum_i |u_i| sqrt(G_ii) <= |u| sqrt(trace G).
    """
    *squares, of_u = torch.cat([Gu @ u, torch.linalg.vector_norm(u)[None]]).tolist()
    if not of_u * max(1.0, *scales) * max(1.0, model.trace) ** 0.5 <= _largest(model.params) ** 0.5:
        return None
    return math.sqrt(
        max(0.0, sum(scale * scale * square for scale, square in zip(scales, squares, strict=True)))
    )


def _norm(direction: Sequence[Tensor], trained: Trained, lr: Sequence[float]) -> float:
    """Return |diag(lr) d|; not finite where an entry of d is not."""
    of_groups = by_group(norms(direction), trained.groups, trained.num_groups)
    return math.hypot(*(length * math.hypot(*values) for length, values in zip(lr, of_groups, strict=True)))


def _largest(params: Sequence[Tensor]) -> float:
    """Return the largest number that all parameters can hold."""
    return min(torch.finfo(dtype).max for dtype in {param.dtype for param in params})
