"""A dense reference for every variant, in parameter space: normal equations with J as one matrix, in float64.

It shares no line with the optimizer: no Gram matrix, no shift, no weights of groups. Each step minimises

    lam/2 |J d + r/lam|^2 + sum_g ( alpha_g/2 |d_g - mu d_previous|^2 + wd_g/2 |w_g + d_g|^2 ).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Problem
from torch import Tensor


@dataclass
class Dense:
    """An optimizer of the flat parameters w [m].

    Attributes:
        problem: Gives the residuals (or logits) as a function of w.
        groups: The group of each parameter of the problem.
        options: Hyper-parameters per group; shared ones are read from the first group.
        labels: If given, the loss is the cross-entropy with the problem's residuals as logits.
    """

    problem: Problem
    groups: Sequence[int]
    options: Sequence[dict[str, Any]]
    labels: Tensor | None = None
    w: Tensor = field(init=False)
    d: Tensor = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        # Options that a group lacks come from the optimizer's constructor, which is given those of the first group.
        self.options = [{**self.options[0], **of_group} for of_group in self.options]
        self.w = self.problem.flat()
        self.d = torch.zeros_like(self.w)

    def entries(self, value: Callable[[dict[str, Any]], float]) -> Tensor:
        """Return one value per entry of w, according to its group."""
        params = self.problem.trained().params.values()
        parts = [
            torch.full((p.numel(),), float(value(self.options[group])), dtype=torch.float64)
            for p, group in zip(params, self.groups, strict=True)
        ]
        return torch.cat(parts)

    def gradient_and_curvature(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return J [n, m], J^T r [m] and J^T H J [m, m]; H = I for squares."""
        f = self.problem.residual_at(self.w)
        J = torch.autograd.functional.jacobian(self.problem.residual_at, self.w)
        if self.labels is None:
            return J, J.T @ f, J.T @ J
        b = len(self.labels)
        p = torch.softmax(f.view(b, -1), dim=1)
        wrong = p - torch.nn.functional.one_hot(self.labels, p.shape[1])
        H = torch.block_diag(*(torch.diag(row) - torch.outer(row, row) for row in p))
        return J, J.T @ wrong.flatten(), J.T @ H @ J

    def step(self) -> None:
        """Move w."""
        shared = {
            "momentum": 0.0, "weight_decay": 0.0, "decoupled_weight_decay": False, "lr": 1.0,
            "damping_convention": "sum", "damping_warmup_steps": 0, "damping_warmup_factor": 10.0,
            "max_step_norm": None, **self.options[0],
        }  # fmt: skip
        J, gradient, curvature = self.gradient_and_curvature()
        b = len(self.problem.args[0])
        of_decay = 1 if shared["damping_convention"] == "sum" else b
        of_alpha = float(curvature.trace()) / len(J) if shared["damping_convention"] == "trace" else of_decay
        left = shared["damping_warmup_steps"] - self.num_steps
        if left > 0:
            of_alpha *= shared["damping_warmup_factor"] ** (left / shared["damping_warmup_steps"])
        alpha = self.entries(lambda group: group["alpha"]) * of_alpha
        decay = self.entries(lambda group: group.get("weight_decay", 0.0))
        lr = self.entries(lambda group: group.get("lr", 1.0))
        inside = torch.zeros_like(decay) if shared["decoupled_weight_decay"] else decay * of_decay
        lam, mu = shared["lam"], shared["momentum"]
        right = -gradient + alpha * mu * self.d - inside * self.w
        self.d = torch.linalg.solve(lam * curvature + torch.diag(alpha + inside), right)
        change = lr * self.d
        if shared["max_step_norm"] is not None:
            change *= min(1.0, shared["max_step_norm"] / float(change.norm()))
        if shared["decoupled_weight_decay"]:
            self.w = (1 - lr * decay) * self.w
        self.w = self.w + change
        self.num_steps += 1


def split_groups(
    problem: Problem, options: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return parameter groups among which the problem's parameters are dealt out, and the group of each."""
    params = list(problem.trained().params.values())
    number = len(options)
    of_each = [i % number for i in range(len(params))]
    groups = [
        {**given, "params": [p for p, own in zip(params, of_each, strict=True) if own == group]}
        for group, given in enumerate(options)
    ]
    # The optimizer goes through its groups one after the other, so its order is not the problem's.
    return groups, of_each


def relative_error(given: Tensor, expected: Tensor, start: Tensor) -> float:
    """Return the error of the path from the start, relative to its length."""
    return float((given - expected).norm() / (expected - start).norm())
