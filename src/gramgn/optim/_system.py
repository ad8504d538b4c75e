"""A step: the linear model of one batch, and what solving it proposes.

b samples, k residuals a sample, n = b k rows, m parameters. With beta_g = alpha_g + wd_g for group g, beta that
of the first group, c_g = beta / beta_g and H = sum_g c_g G_g::

    (lam H + beta I) v = r + lam J s        d_g = s_g - c_g J_g^T v        w_g <- w_g + lr_g d_g

which is d_g = s_g - J_g^T u / beta_g with u = (lam sum_g G_g / beta_g + I)^-1 (r + lam J s), the minimiser of
lam/2 |J d + r / lam|^2 + sum_g beta_g/2 |d_g - s_g|^2; for one group and s = 0 it is the paper's step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.optim._damping import Damping
from gramgn.optim._info import NON_FINITE, SolveError
from gramgn.optim._settings import Settings
from gramgn.optim._shift import shift
from gramgn.optim._solve import Solution, solve
from gramgn.optim._vectors import by_group, norms
from gramgn.optim.closure import Trained
from gramgn.optim.gram import Linearisation
from gramgn.optim.runtime import span


@dataclass(frozen=True)
class System:
    """The linear model of one batch, r + J d.

    Attributes:
        J: The Jacobian.
        trained: The parameters, m entries in all.
        G: J J^T of each parameter group, [groups, n, n] in float64.
        gram: Their sum.
        trace: Its trace.
        r: The residuals [n] in float64, beside G.
        previous: The direction of the step before, parameter by parameter; None where there was none.
        number: The number of the step, for messages.
    """

    J: Linearisation
    trained: Trained
    G: Tensor
    gram: Tensor
    trace: float
    r: Tensor
    previous: Sequence[Tensor | None]
    number: int

    @property
    def params(self) -> list[Tensor]:
        """The parameters."""
        return list(self.trained.params.values())


@dataclass(frozen=True)
class Step:
    """What is proposed to add to the parameters, lr_g d_g.

    Attributes:
        settings: What it was computed with.
        damping: alpha and wd in the sum convention.
        solution: v and how it was found.
        lr: The step length of each group, shortened where the step was too long.
        direction: d in the shapes of the parameters; None: d = -c_g J_g^T v was proved finite, not formed.
        change: J diag(lr) d [n], what the linear model adds to the residuals.
        norm: |diag(lr) d|.
        finite: Whether there is such a step.
    """

    settings: Settings
    damping: Damping
    solution: Solution
    lr: tuple[float, ...]
    direction: list[Tensor] | None
    change: Tensor
    norm: float
    finite: bool


def linear_model(
    J: Linearisation, trained: Trained, previous: Sequence[Tensor | None], number: int
) -> System:
    """Return the system of a batch that was linearised; see ``System``."""
    G = J.gram()
    whole = G[0] if len(G) == 1 else G.sum(dim=0)
    r = J.reading.residual.flatten().to(G.device).to(G.dtype)
    return System(J, trained, G, whole, float(whole.trace()), r, previous, number)


def propose(system: System, settings: Settings, *, explicit: bool) -> Step:
    """Solve the system.

    Args:
        system: The linear model.
        settings: Damping, step lengths and the rest.
        explicit: Form d even where it can be added to the parameters unseen.

    Raises:
        SolveError: No solution was found.
    """
    J, lr = system.J, settings.lr
    damping = settings.damping(J.num_samples, mean_eigenvalue=system.trace / len(system.r))
    s = shift(system.params, system.previous, system.trained.groups, damping, settings.momentum)
    Js = None if s is None else J.jvp(s)
    with span("gramgn.solve"):
        rhs = system.r if Js is None else system.r + settings.lam * Js
        solution = _solved(system, damping, settings.lam, rhs)
    if solution.status == NON_FINITE:
        return Step(settings, damping, solution, lr, None, torch.full_like(rhs, math.nan), math.nan, False)

    Gv = system.G @ solution.u
    scales = [length * c for length, c in zip(lr, damping.weights, strict=True)]
    change = -sum(scale * row for scale, row in zip(scales, Gv, strict=True))
    if s is not None and Js is not None:
        change = change + _of_shift(system, lr, s, Js)
    # Where G's small end is rounding, so is v^T G v; and momentum keeps d.
    # Decay changes w before the step is added, and an engine that goes backward again needs w as it was.
    decays = settings.decoupled_weight_decay and any(settings.weight_decay)
    unseen = not (s is not None or explicit or settings.momentum or solution.ill_conditioned or decays)
    norm = _norm_of_unseen(system, solution.u, Gv, scales) if unseen else None
    direction = None
    if norm is None:
        with span("gramgn.update"):
            direction = _direction(system, s, solution.u, damping.weights)
            norm = _norm(direction, system.trained, lr)
    finite = norm <= _largest(system.params)
    if settings.max_step_norm is not None and finite and norm > settings.max_step_norm:
        shorter = settings.max_step_norm / norm
        lr, change, norm = tuple(shorter * length for length in lr), shorter * change, settings.max_step_norm
    return Step(settings, damping, solution, lr, direction, change, norm, finite)


def add_step(system: System, step: Step, fraction: float = 1.0) -> None:
    """Add a fraction of the step to the parameters, after decoupled weight decay, if there is any.

    Decoupled decay is w <- (1 - lr wd) w with the configured lr (Loshchilov and Hutter 2019, AdamW).
    """
    settings, params, groups = step.settings, system.params, system.trained.groups
    with span("gramgn.update"):
        if settings.decoupled_weight_decay and any(settings.weight_decay):
            kept = [1 - lr * wd for lr, wd in zip(settings.lr, settings.weight_decay, strict=True)]
            torch._foreach_mul_(params, [kept[group] for group in groups])
        if step.direction is None:
            scales = [-fraction * length * c for length, c in zip(step.lr, step.damping.weights, strict=True)]
            system.J.add_vjp_(params, step.solution.u, [scales[group] for group in groups])
            return
        for group in sorted(set(groups)):
            members = [i for i, other in enumerate(groups) if other == group]
            torch._foreach_add_(
                [params[i] for i in members],
                [step.direction[i] for i in members],
                alpha=fraction * step.lr[group],
            )


def _solved(system: System, damping: Damping, lam: float, rhs: Tensor) -> Solution:
    """Solve (lam H + beta I) v = rhs, or say what was to be solved when that failed."""
    H, beta = system.gram, damping.beta
    if set(damping.weights) != {1.0}:
        H = torch.tensordot(
            torch.tensor(damping.weights, dtype=system.G.dtype).to(system.G.device), system.G, 1
        )
    try:
        return solve(H, rhs, lam, beta, system.J.eps)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        condition = 1 + lam * float(torch.linalg.matrix_norm(H)) / beta if beta > 0 else math.inf
        raise SolveError(
            f"step {system.number}: the system lam G + alpha I could not be solved (lam {lam:g}, alpha "
            f"{beta:g} in the sum convention, batch size {len(H)} rows, condition number up to "
            f"{condition:.1e}); no parameter was changed. Raise alpha. {error}"
        ) from error


def _of_shift(system: System, lr: Sequence[float], s: Sequence[Tensor], Js: Tensor) -> Tensor:
    """Return J diag(lr) s, from J s where all lr are equal."""
    groups = system.trained.groups
    if len({lr[group] for group in groups}) == 1:
        return lr[groups[0]] * Js
    return system.J.jvp([lr[group] * term for group, term in zip(groups, s, strict=True)])


def _norm_of_unseen(system: System, v: Tensor, Gv: Tensor, scales: Sequence[float]) -> float | None:
    """Return |diag(lr) d| = sqrt(sum_g scale_g^2 v^T G_g v), or None where an entry of d might overflow.

    |J_ij| <= sqrt(G_ii), so no partial sum of J_g^T v exceeds sum_i |v_i| sqrt(G_ii).
    """
    bounds = system.G.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() @ v.abs()
    *numbers, largest = torch.cat([Gv @ v, bounds, v.abs().max()[None]]).tolist()
    squares, bounds_of_group = numbers[: len(scales)], numbers[len(scales) :]
    limit = _largest(system.params) ** 0.5
    bound = max(max(1.0, scale) * bound for scale, bound in zip(scales, bounds_of_group, strict=True))
    if not max(bound, largest) <= limit:
        return None
    return math.sqrt(
        max(0.0, sum(scale * scale * square for scale, square in zip(scales, squares, strict=True)))
    )


def _direction(system: System, s: list[Tensor] | None, v: Tensor, weights: Sequence[float]) -> list[Tensor]:
    """Return d_g = s_g - c_g J_g^T v, in the memory of s where there is one."""
    d = [torch.zeros_like(param) for param in system.params] if s is None else s
    system.J.add_vjp_(d, v, [-weights[group] for group in system.trained.groups])
    return d


def _norm(direction: Sequence[Tensor], trained: Trained, lr: Sequence[float]) -> float:
    """Return |diag(lr) d|; not finite where an entry of d is not."""
    of_groups = by_group(norms(direction), trained.groups, trained.num_groups)
    return math.hypot(*(length * math.hypot(*values) for length, values in zip(lr, of_groups, strict=True)))


def _largest(params: Sequence[Tensor]) -> float:
    """Return the largest number that all parameters can hold."""
    return min(torch.finfo(dtype).max for dtype in {param.dtype for param in params})
