"""The optimizer: Algorithm 1 of arXiv 1905.11675 as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim._damping import alpha_in_sum, check_hyperparameters
from gramgn.optim._engine import Closure
from gramgn.optim._engines import make_engine
from gramgn.optim._guards import (
    check_batch_statistics,
    check_model,
    check_modes,
    check_process,
    note_device,
)
from gramgn.optim._info import NON_FINITE, STATUSES, WARNINGS, SolveError, StepInfo
from gramgn.optim._memory import explained_out_of_memory
from gramgn.optim._parameters import trainable
from gramgn.optim._solve import Solution, solve
from gramgn.optim._state import check_state, pack_state


class GramGaussNewton(torch.optim.Optimizer):
    """Gram-Gauss-Newton for regression: a Gauss-Newton step through the b x b Gram matrix of a mini-batch.

    With residuals r = f - y of b samples, J their Jacobian with respect to the m trainable parameters::

        G = J J^T        u = (lam G + alpha I)^-1 r        w <- w - lr J^T u

    "GGN" means *Gram*-Gauss-Newton here, not the generalized Gauss-Newton matrix. In the words of others this
    is Levenberg-Marquardt with damping alpha / lam and step 1 / lam. The loss is mean(r^2), without a factor
    1/2::

        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
        for x, y in loader:
            info = optimizer.step(lambda: model(x) - y)

    ``lr``, ``lam``, ``alpha`` and ``damping_convention`` live in ``param_groups[0]``, where schedulers change
    them. Parameters with ``requires_grad=False`` have no column in J and do not move. ``p.grad`` is not read
    or written. The optimizer holds the module itself: copy or pickle both together, ``copy.deepcopy((model,
    optimizer))``. On Apple's MPS, which has no float64, G is summed and the system solved on the CPU.

    Args:
        model: The network. Each output must depend on its own sample only (no batch statistics).
        params: What to train: parameters of ``model``, or one parameter group; None: all that require
            gradients.
        lr: Factor on the step; the method has none, so 1.
        lam: lambda of the paper, > 0; 1 there.
        alpha: alpha of the paper, >= 0; 0 is the minimum-norm step.
        damping_convention: ``"sum"``: alpha stands beside the sum J J^T, as the formula is printed.
            ``"mean"``: beside the mean J J^T / b, as the mean square loss suggests: alpha_sum = alpha b.
        chunk_size: Samples at a time while J is formed, for ``engine="vmap"``; None: the whole batch. Results
            agree to rounding.
        engine: ``"vmap"``; ``"stream"``: J layer by layer in one backward pass, without the blocks of linear
            layers (the rest of J stays in memory for the next step); or ``"loop"``: one backward pass for
            each row, for tests and odd networks.

    Attributes:
        counts: How often: ``steps`` in all, each status of ``StepInfo``, and ``ill_conditioned``.

    Raises:
        ValueError: A value is out of range; nothing to train, or foreign parameters; more than one parameter
            group; batch statistics in training mode; a compiled or wrapped model.
        RuntimeError: Autocast is on, or this process is one of several (WORLD_SIZE > 1).
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1.0,
        lam: float,
        alpha: float,
        damping_convention: str = "sum",
        chunk_size: int | None = None,
        engine: str = "vmap",
    ) -> None:
        check_process()
        check_model(model)
        defaults = {"lr": lr, "lam": lam, "alpha": alpha, "damping_convention": damping_convention}
        check_hyperparameters(defaults)
        self._engine = make_engine(engine, chunk_size)
        self._model = model
        self._everything = params is None
        self.counts = dict.fromkeys(("steps", *STATUSES, "ill_conditioned"), 0)
        if params is None:
            params = [param for param in model.parameters() if param.requires_grad]
            if not params:
                raise ValueError(
                    f"{type(model).__name__} has no parameter that requires a gradient: nothing to train"
                )
        super().__init__(params, defaults)
        device = next(iter(self._trainable().values())).device
        check_modes(device)
        note_device(device)

    def step(self, closure: Closure) -> StepInfo:  # type: ignore[override]
        """Take one step on one mini-batch.

        Args:
            closure: Calls the model exactly once, on the whole batch, and returns the residuals f - y, [b] or
                [b, k]. It is called once. The first tensor that the model is called with holds the samples in
                its leading dimension; so does every other tensor of that leading size, the rest is shared.

        Returns:
            What happened. Where the status is ``"non_finite"`` no parameter was changed.

        Raises:
            ValueError: The closure breaks its contract, or a value in ``param_groups`` is out of range.
            RuntimeError: Autocast is on.
            SolveError: No solution was found; no parameter was changed.
            torch.OutOfMemoryError: J does not fit; the message holds an estimate and what to lower.
        """
        lr, lam, alpha = check_hyperparameters(self.param_groups[0])
        params = self._trainable()
        check_batch_statistics(self._model)
        check_modes(next(iter(params.values())).device)

        with explained_out_of_memory(params), torch.enable_grad():
            J = self._engine.linearise(self._model, params, closure)
        with explained_out_of_memory(params, J.residual), torch.no_grad():
            G = J.gram()
            r = J.residual.flatten().to(G.device).to(G.dtype)
            alpha_sum = alpha_in_sum(alpha, J.num_samples, self.param_groups[0]["damping_convention"])
            solution = self._solve(G, r, lam, alpha_sum, J.eps)
            step = J.vjp(lr * solution.u)
            step_norm = _norm(step)
            moves = solution.status != NON_FINITE and math.isfinite(step_norm)
            if moves:
                for param, change in zip(params.values(), step, strict=True):
                    param.sub_(change)
            # J (J^T u) = G u, so the loss that the linear model predicts is free.
            loss = float(r.square().mean())
            predicted = float((r - lr * (G @ solution.u)).square().mean())

        info = StepInfo(
            loss=loss,
            residual=J.residual,
            num_samples=J.num_samples,
            lam=lam,
            alpha_sum=alpha_sum,
            step_norm=step_norm if moves else 0.0,
            predicted_decrease=loss - predicted if moves else math.nan,
            status=solution.status if moves else NON_FINITE,
            ill_conditioned=solution.ill_conditioned and moves,
            trace=float(G.trace()),
            gram=G,
        )
        self._count(info)
        return info

    def _solve(self, G: Tensor, r: Tensor, lam: float, alpha_sum: float, eps: float) -> Solution:
        """Solve (lam G + alpha I) u = r, or say what was to be solved when that failed."""
        try:
            return solve(G, r, lam, alpha_sum, eps)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            condition = (
                1 + lam * float(torch.linalg.matrix_norm(G)) / alpha_sum if alpha_sum > 0 else math.inf
            )
            raise SolveError(
                f"step {self.counts['steps'] + 1}: the system lam G + alpha I could not be solved (lam "
                f"{lam:g}, alpha {alpha_sum:g} in the sum convention, batch size {len(G)} rows, condition "
                f"number up to {condition:.1e}); no parameter was changed. Raise alpha. {error}"
            ) from error

    def _count(self, info: StepInfo) -> None:
        """Count the step, and warn at the first one of a kind that the user should know of."""
        for name, seen in (
            (NON_FINITE, info.status == NON_FINITE),
            ("ill_conditioned", info.ill_conditioned),
        ):
            if seen and not self.counts[name]:
                warnings.warn(f"GramGaussNewton: {WARNINGS[name]}", RuntimeWarning, stacklevel=4)
        self.counts["steps"] += 1
        self.counts[info.status] += 1
        self.counts["ill_conditioned"] += info.ill_conditioned

    def _trainable(self) -> dict[str, Tensor]:
        """Return the parameters to train in this step, by their names in the model."""
        return trainable(self._model, self.param_groups[0]["params"], everything=self._everything)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one parameter group; a second is refused: lam and alpha act on one system for all.

        Args:
            param_group: As for every torch optimizer.

        Raises:
            ValueError: There is a group already.
        """
        if self.param_groups:
            raise ValueError(
                "GramGaussNewton takes one parameter group: all parameters share one linear system with one "
                "lam and one alpha. Pass the parameters as one list; freeze some with requires_grad=False"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters and counts as plain Python values; the model is not part of it."""
        return pack_state(super().state_dict(), self.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over hyper-parameters and counts.

        Args:
            state_dict: What ``state_dict`` of a ``GramGaussNewton`` returned.

        Raises:
            ValueError: It is the state of another optimizer, or of other parameters.
        """
        counts = check_state(state_dict, self.counts)
        super().load_state_dict(dict(state_dict))
        self.counts = counts

    def __getstate__(self) -> dict[str, Any]:
        """Keep model and engine beside what torch keeps, so that the pair survives deepcopy and pickle."""
        own = {name: vars(self)[name] for name in ("_engine", "_model", "_everything", "counts")}
        return {**super().__getstate__(), **own}


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all entries of all tensors; not finite if one entry is not."""
    norms = [torch.linalg.vector_norm(t.to(torch.promote_types(t.dtype, torch.float32))) for t in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
