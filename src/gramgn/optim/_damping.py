"""What alpha and weight decay stand beside, and how they enter the one system of all parameter groups."""

from __future__ import annotations

from dataclasses import dataclass

from gramgn.damping import sum_scale


def warmed_up(alpha: float, num_steps: int, warmup_steps: int, factor: float) -> float:
    """Return alpha in the warm-up of damping: ``factor`` alpha at first, falling geometrically to alpha.

    Args:
        alpha: The value as configured.
        num_steps: The steps taken before this one.
        warmup_steps: How long it lasts.
        factor: What alpha is multiplied by in the first step.
    """
    return alpha * factor ** (1 - num_steps / warmup_steps) if num_steps < warmup_steps else alpha


@dataclass(frozen=True)
class Damping:
    """Damping and weight decay inside of the solve by parameter group, beside the *sum* J J^T.

    Attributes:
        alpha: alpha of each group.
        weight_decay: wd of each group; 0 where it is decoupled.
        first: The first group that has something to train.
    """

    alpha: tuple[float, ...]
    weight_decay: tuple[float, ...]
    first: int

    @property
    def betas(self) -> tuple[float, ...]:
        """Return alpha + wd of each group."""
        return tuple(alpha + wd for alpha, wd in zip(self.alpha, self.weight_decay, strict=True))

    @property
    def beta(self) -> float:
        """Return alpha + wd of the first group: the damping of the system that is solved."""
        return self.betas[self.first]

    @property
    def weights(self) -> tuple[float, ...]:
        """Return c = beta / (alpha + wd), by which each group's share of G stands in that system; 1 for one group."""
        return tuple(self.beta / beta if beta > 0 else 1.0 for beta in self.betas)


def beside_sum(
    alpha: tuple[float, ...],
    weight_decay: tuple[float, ...],
    convention: str,
    *,
    first: int,
    num_samples: int,
    mean_eigenvalue: float,
) -> Damping:
    """Translate alpha and weight decay to where they stand beside the sum J J^T.

    Args:
        alpha: By group, as configured.
        weight_decay: By group, as configured; 0 where it is decoupled.
        convention: See ``gramgn.damping``. With ``"trace"``, weight decay is relative to the mean: it belongs to
            what is minimised and not to the step.
        first: The first group that has something to train.
        num_samples: b, the samples in this batch (not rows: also for several outputs).
        mean_eigenvalue: trace(G) / n, over all groups and n rows.
    """
    of_alpha = sum_scale(convention, num_samples=num_samples, mean_eigenvalue=mean_eigenvalue)
    of_decay = sum_scale("sum" if convention == "sum" else "mean", num_samples=num_samples)
    return Damping(
        tuple(value * of_alpha for value in alpha), tuple(value * of_decay for value in weight_decay), first
    )
