"""What the lemmas speak of, measured along a run: residuals, drift of J and G, distance from the initialisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramgn.models import TwoLayer
from gramgn.optim import GramGaussNewton
from gramgn.theory.checks import check_float64, whole
from gramgn.theory.network import gram_of, outputs, slopes

ORDERS = ("cyclic", "shuffle")
TakeStep = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class PathPoint:
    """The network at one time of a run.

    Attributes:
        residual: |f - y|, Euclidean, in the targets' unit.
        distance: R = |W - W_0|, Frobenius.
        drift_J: |J - J_0|, Frobenius; the paper: at most of order R sqrt(n / M).
        drift_J_row: The largest |J_i - J_0,i| of a row; the paper: of order R / sqrt M.
        drift_G: |G - G_0|, spectral; the paper: at most of order n R / sqrt M.
    """

    residual: float
    distance: float
    drift_J: float  # noqa: N815 - the paper's symbol
    drift_J_row: float  # noqa: N815
    drift_G: float  # noqa: N815


@dataclass(frozen=True)
class Start:
    """Where a run begins: what later points are compared with.

    Attributes:
        W: W_0 [M, d].
        slopes: The factor of J_0 that is not x, [n, M].
        G: G_0 [n, n], formula (3).
        x: Samples [n, d].
        y: Targets [n].
    """

    W: Tensor
    slopes: Tensor
    G: Tensor
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, model: TwoLayer, x: Tensor, y: Tensor) -> Start:
        """Return the start at the present weights of a network.

        Raises:
            ValueError: Another shape or dtype than samples [n, d] and targets [n] in float64.
        """
        s = slopes(model, x)
        check_float64(y=y)
        if y.shape != x.shape[:1]:
            raise ValueError(
                f"y must be targets [{len(x)}], one for each row of x, got shape {list(y.shape)}"
            )
        return cls(model.hidden.weight.detach().clone(), s, gram_of(s, x), x, y)

    def measure(self, model: TwoLayer) -> PathPoint:
        """Return where the network is now; J is not formed."""
        s = slopes(model, self.x)
        # Row i of J - J_0 is an outer product: its norm is the product of two norms.
        rows = (s - self.slopes).norm(dim=1) * self.x.norm(dim=1)
        return PathPoint(
            residual=float((outputs(model, self.x) - self.y).norm()),
            distance=float((model.hidden.weight.detach() - self.W).norm()),
            drift_J=float(rows.norm()),
            drift_J_row=float(rows.max()),
            drift_G=float(torch.linalg.matrix_norm(gram_of(s, self.x) - self.G, ord=2)),
        )


@dataclass(frozen=True)
class Path:
    """A run.

    Attributes:
        start: W_0, J_0 and G_0.
        points: At the start and after each epoch, T + 1 of them.
    """

    start: Start
    points: tuple[PathPoint, ...]

    @property
    def residuals(self) -> list[float]:
        """|f - y| at the start and after each epoch."""
        return [point.residual for point in self.points]


def ggn_step(model: TwoLayer, *, lam: float = 1.0, alpha: float = 0.0) -> TakeStep:
    """Return a function that takes one GGN step on a batch (x, y); the defaults are those of the theorems.

    Args:
        model: The network that is trained.
        lam: lambda of the paper.
        alpha: alpha of the paper, in the sum convention.
    """
    optimizer = GramGaussNewton(model, lam=lam, alpha=alpha, damping_convention="sum")

    def step(x: Tensor, y: Tensor) -> object:
        return optimizer.step(lambda: model(x) - y)

    return step


def descent_step(model: TwoLayer, *, lr: float) -> TakeStep:
    """Return a function that takes one step of gradient descent on 1/2 |f - y|^2 of a batch (x, y).

    Args:
        model: The network that is trained.
        lr: eta of formula (11); beyond 2 / lambda_max(G) it diverges, `best_learning_rate(G)` is the fastest.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum() / 2
        loss.backward()
        return optimizer.step()

    return step


def follow(
    model: TwoLayer,
    x: Tensor,
    y: Tensor,
    *,
    num_epochs: int,
    batch_size: int | None = None,
    order: str = "cyclic",
    step: TakeStep | None = None,
    seed: int = 0,
) -> Path:
    """Train the network and measure the theory's quantities before it and after each epoch.

    Args:
        model: The network, in float64; it is trained in place.
        x: Samples [n, d].
        y: Targets [n].
        num_epochs: T.
        batch_size: b; None: all samples, so that an epoch is one step (Theorem 1). The last batch may be smaller.
        order: `"cyclic"`: consecutive samples, the same batches in the same order in every epoch (Theorem 2);
            `"shuffle"`: a new permutation in every epoch.
        step: Takes a step of any optimizer on a batch; None: `ggn_step(model)`.
        seed: Of the permutations.

    Raises:
        ValueError: Another order; a number below 1; data of another shape or dtype.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    num_epochs, seed = whole("num_epochs", num_epochs, 1), whole("seed", seed, 0)
    start = Start.of(model, x, y)
    b = len(x) if batch_size is None else whole("batch_size", batch_size, 1)
    step = ggn_step(model) if step is None else step
    generator = torch.Generator().manual_seed(seed)
    points = [start.measure(model)]
    for _ in range(num_epochs):
        rows = torch.arange(len(x)) if order == "cyclic" else torch.randperm(len(x), generator=generator)
        for batch in rows.to(x.device).split(b):
            step(x[batch], y[batch])
        points.append(start.measure(model))
    return Path(start, tuple(points))
