"""The quantities of the theorems, measured along a training run of the two-layer network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.models import TwoLayer
from gramgn.theory.full_batch import gauss_newton, gradient_descent
from gramgn.theory.gauss_seidel import split
from gramgn.theory.kernel import limit_kernel
from gramgn.theory.path import Start
from gramgn.theory.spectrum import linear_residuals, spectral_radius


class Observer:
    """Compares a network during training with where it started and with its linearisation there.

    Args:
        model: The two-layer network before its first step, in float64.
        x: Training samples [n, d].
        y: Training targets [n].
        num_epochs: T, to which the linearised network is followed.
        batch_size: b; n for full batches.
        order: `"cyclic"` or `"shuffle"`.
        lam: lambda of GGN; None for gradient descent.
        alpha: alpha of GGN in the sum convention.
        lr: Learning rate eta of gradient descent on 1/2 |f - y|^2; None for GGN.

    Attributes:
        constants: `n`, `d`, `M`, `activation`, `order`, and the numbers known before training: `lambda_0` (least
            eigenvalue of the limit kernel K), `kernel_gap` (|G_0 - K|, spectral) and `rho` (contraction per epoch
            of the linearised network; None where the theory has no prediction: in random order, or for damped
            mini-batches).

    Raises:
        ValueError: Another network, shape or dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        num_epochs: int,
        batch_size: int,
        order: str,
        lam: float | None,
        alpha: float = 0.0,
        lr: float | None = None,
    ) -> None:
        if not isinstance(model, TwoLayer):
            raise ValueError(
                f"the theory is about the two-layer network, got {type(model).__name__}: choose model=two_layer, "
                "or leave trainer.theory_every null"
            )
        self._model, self._start = model, Start.of(model, x, y)
        limit = limit_kernel(x, model.activation)
        with torch.no_grad():
            r = model(x) - y
        G = self._start.G
        rho: float | None = None
        self._linear: list[float] | None = None
        if batch_size >= len(x):
            if lam is not None:
                method = gauss_newton(G, lam=lam, alpha=alpha)
            else:
                assert lr is not None
                method = gradient_descent(G, lr=lr)
            rho, self._linear = method.rho, method.residuals(r, num_epochs)
        elif order == "cyclic" and (lam, alpha) == (1.0, 0.0):
            splitting = split(G, batch_size)
            rho, self._linear = spectral_radius(splitting), linear_residuals(splitting, r, num_epochs)
        self.constants: dict[str, Any] = {
            "n": len(x),
            "d": x.shape[1],
            "M": model.width,
            "activation": model.activation,
            "order": order,
            "lambda_0": limit.lambda_0,
            "kernel_gap": float(torch.linalg.matrix_norm(G - limit.K, ord=2)),
            "rho": rho,
        }

    def measure(self, epoch: int) -> dict[str, float | None]:
        """Return `residual`, `linear_residual`, `distance`, `drift_J`, `drift_J_row` and `drift_G` now.

        Args:
            epoch: Number of epochs done; 0 before training.
        """
        linear = None if self._linear is None else self._linear[epoch]
        return asdict(self._start.measure(self._model)) | {"linear_residual": linear}
