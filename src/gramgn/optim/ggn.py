"""The optimizer: Algorithm 1 of arXiv 1905.11675 as a `torch.optim.Optimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramgn.optim.acceptance import Armijo, Grid, LevenbergMarquardt, Line, Outcome, Trial, make_acceptance
from gramgn.optim.algorithm import LinearModel, Step, add_step_, linear_model, propose
from gramgn.optim.closure import Closure, Trained, trainable
from gramgn.optim.engines import Options, engine_options
from gramgn.optim.gram import Linearisation
from gramgn.optim.guards import (
    check_batch_statistics,
    check_model,
    check_modes,
    note_device,
)
from gramgn.optim.info import WARNINGS, StepInfo, report
from gramgn.optim.kept import Kept, structure_of
from gramgn.optim.kernels import OFF, serves
from gramgn.optim.losses import SquaredError, make_loss
from gramgn.optim.ranks import find_ranks, start_together, step_together
from gramgn.optim.rows import OF_TERMS, Objective, RowMemory
from gramgn.optim.runtime import explained_out_of_memory
from gramgn.optim.settings import (
    OF_ALL,
    OF_GROUP,
    Settings,
    check_groups,
    check_new_group,
    check_shared,
    read_settings,
)
from gramgn.optim.snapshot import Snapshot
from gramgn.optim.solve import NON_FINITE, STATUSES
from gramgn.optim.state import DIRECTION, check_state, pack_state
from gramgn.optim.terms import Term, check_terms

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from gramgn.optim.experimental import CapturedStep

COUNTS = ("steps", *STATUSES, "ill_conditioned", "rejected", "given_up")


@dataclass(frozen=True)
class StepBatch:
    """What a step is taken on."""

    trained: Trained
    settings: Settings
    closure: Closure
    objective: Objective | None  # of a step on terms
    before: Snapshot | None  # the state in which the engine finds the model, where there are trial points


Decide = Callable[[LinearModel, StepBatch], Outcome]


class GramGaussNewton(torch.optim.Optimizer):
    """Gram-Gauss-Newton: a Gauss-Newton step through the b x b Gram matrix of a mini-batch.

    With residuals r = f - y of b samples, J their Jacobian with respect to the m trainable parameters::

        G = J J^T        u = (lam G + alpha I)^-1 r        w <- w - lr J^T u

    "GGN" means *Gram*-Gauss-Newton here, not the generalized Gauss-Newton matrix. In other words, this is
    Levenberg-Marquardt with damping alpha / lam and step size 1 / lam. The loss is mean(r^2), without a factor 1/2::

        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3)
        for x, y in loader:
            info = optimizer.step(lambda: model(x) - y)

    `param_groups` hold the hyper-parameters, for `torch.optim.lr_scheduler` and for users; groups may differ in `lr`,
    `alpha` and `weight_decay`. Gradients (`param.grad`) are neither read nor written. To copy or pickle it, copy or
    pickle model and optimizer together, `copy.deepcopy((model, optimizer))`. On Apple's MPS, which has no float64, G is
    summed and the system solved on the CPU. Not part of `state_dict`: model, loss, engine, `adaptive_damping` and
    `line_search`.

    Args:
        model: The network. Each output must depend on its own sample only (no batch statistics).
        params: What to train: parameters of `model`, or parameter groups; None (default): all that require gradients.
        lr: Step size, >= 0; default 1. Multiplies the step; the paper has no such factor.
        lam: lambda of the paper, > 0; required; the paper uses 1.
        alpha: Damping alpha of the paper, >= 0; 0 for all groups gives the minimum-norm step.
        damping_convention: What alpha is relative to (see `gramgn.damping`). `"mean"` (default): the mean J J^T / b, as
            the mean square loss suggests, alpha_sum = alpha b. `"sum"`: the sum J J^T, as the paper prints the
            formula. `"trace"`: the mean eigenvalue of G, alpha_sum = alpha trace(G) / (b k), after Marquardt (1963),
            whose damping is relative to the curvature too.
        loss: `"squared_error"` (default), or `"cross_entropy"`: the closure returns logits [b, k] and labels [b], and
            the step is d = -(lam C + alpha I)^-1 g with gradient g and generalised Gauss-Newton matrix C of the summed
            cross-entropy (the paper's future work; Schraudolph 2002).
        momentum: mu of SPRING (Goldshlager, Abrahamsen and Lin, arXiv 2401.10190), in [0, 1); default 0, 0.9 is
            recommended. The damping then pulls the step towards mu times the previous one instead of towards 0. With
            alpha = wd = 0, momentum has no effect.
        weight_decay: wd >= 0, in the convention of alpha (with `"trace"`: the mean); default 0. The penalty
            1/2 wd |w + d|^2 is part of the system that is solved.
        decoupled_weight_decay: Take weight decay out of the system: w <- (1 - lr wd) w before the step, wd unscaled
            (Loshchilov and Hutter 2019); default False.
        adaptive_damping: None (default), or `LevenbergMarquardt(...)`, with which alpha follows the ratio of actual and
            predicted decrease; or a mapping of its fields.
        damping_warmup_steps: Number of initial steps with increased alpha; 0 (default) disables the warm-up.
        damping_warmup_factor: Factor of alpha in the first step, >= 1, falling geometrically to 1; default 10.
        max_step_norm: A step lr d whose Euclidean norm over all parameters is larger is scaled to this norm (as SPRING
            does); None (default): no limit.
        line_search: None (default), `"armijo"` or `Armijo(...)`: backtracking from lr; or a mapping of its fields;
            `"grid"` or `Grid(...)`: the best of lr, lr/2, lr/4, ... Momentum continues the part of d that was taken.
        engine: How J is formed. `"stream"` (default) or `Stream(...)`: layer by layer in one backward pass; `"vmap"` or
            `Vmap(...)`: by `torch.func`; `"rows"` or `Rows()`: one batched backward pass per row, whatever the
            closure does; `"loop"` or `Loop()`: the same one by one, for tests. Or a mapping of `name` and the fields
            of these.
        process_group: The processes that take each step together. None (default): the default group of
            `torch.distributed`, if it is initialised, else this process alone. Or a `ProcessGroup`, or a `DeviceMesh`
            of one dimension; with a group of this process alone the optimizer is independent of other processes. All
            processes build the optimizer on the plain network, whose parameters and buffers become those of rank 0;
            the closure of each returns the residuals of its own samples. Not part of `state_dict` and pickles.

    Attributes:
        counts: The number of `steps` in total, of each status of `StepInfo`, of `ill_conditioned` steps, of tries
            `rejected` and of steps `given_up`.

    Raises:
        ValueError: A value is out of range; there is nothing to train, or parameters of another model; parameter groups
            that are incompatible; batch statistics in training mode; a compiled or wrapped model.
        RuntimeError: Autocast is on, or this process is one of several (WORLD_SIZE > 1) and `torch.distributed` is not
            initialised.
    """

    takes_model = True
    """Built from the module itself, with a closure of the residuals: a training loop may ask for this attribute."""

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1.0,
        lam: float,
        alpha: float,
        damping_convention: str = "mean",
        loss: str = "squared_error",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        adaptive_damping: LevenbergMarquardt | Mapping[str, Any] | None = None,
        damping_warmup_steps: int = 0,
        damping_warmup_factor: float = 10.0,
        max_step_norm: float | None = None,
        line_search: Armijo | Grid | Mapping[str, Any] | str | None = None,
        engine: str | Options | Mapping[str, Any] = "stream",
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        check_model(model)
        options = engine_options(engine)
        self._engine = options.build()
        self._loss = make_loss(loss)
        self._acceptance = make_acceptance(adaptive_damping, line_search)
        self._options: dict[str, Any] = {"loss": loss, "acceptance": self._acceptance, "engine": options}
        self._model = model
        self._kept: Kept[Trained] = Kept()
        self._memory = RowMemory()
        self._checked: Kept[bool] = Kept()
        self._everything = params is None
        self.counts = dict.fromkeys(COUNTS, 0)
        if params is None:
            params = [param for param in model.parameters() if param.requires_grad]
            if not params:
                raise ValueError(
                    f"{type(model).__name__} has no parameter that requires a gradient: nothing to train"
                )
        super().__init__(
            params,
            {
                "lr": lr,
                "lam": lam,
                "alpha": alpha,
                "damping_convention": damping_convention,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
                "damping_warmup_steps": damping_warmup_steps,
                "damping_warmup_factor": damping_warmup_factor,
                "max_step_norm": max_step_norm,
            },
        )
        trained = self._trained()
        self._settings(trained)
        device = next(iter(trained.params.values())).device
        check_modes(device)
        note_device(device)
        self._ranks = find_ranks(process_group, device)
        if self._ranks is not None:
            start_together(self, self._ranks)

    @property
    def kernels(self) -> str:
        """The form of the compiled kernels that this optimizer uses, or `"off"`: they serve float32 on the CPU."""
        return self._engine.kernels_form() if self._is_served() else OFF

    def _is_served(self) -> bool:
        """Return whether compiled kernels can read one of the parameters."""
        return any(map(serves, self._trained().params.values()))

    @property
    def choices(self) -> dict[str, Any]:
        """What decides the last bits of J: the engine's name, and what it chose by processor or measuring."""
        return {"name": self._options["engine"].name, **self._engine.state_dict()}

    def step(  # type: ignore[override]
        self, closure: Closure | None = None, *, terms: Sequence[Term] | Term | None = None
    ) -> StepInfo:
        """Take one step on one mini-batch: on the residuals of a closure, or on terms.

        Args:
            closure: Calls the model on the whole batch, also several times, and returns residuals f - y, [b] or [b, k]
                (for cross-entropy: logits [b, k] and labels [b]). It is called once, and with `adaptive_damping` or
                `line_search` again per trial point, with the same random numbers and the same state of the network,
                buffers included. The first tensor that the model is called with holds the samples in its leading
                dimension; so does every other tensor of that leading size, the rest is shared.
                With a `process_group`, all processes call `step`, each on its own samples; None: it has none.
            terms: Residuals of any kind; see `Term`. The step minimises the sum over terms of weight times the mean
                over its samples of |r|^2: rows are scaled by sqrt(weight B / b) for b of B samples in total, so that
                one term of weight 1 is the step of a closure. With `damping_convention="sum"` it is the sum over
                samples, with rows scaled by sqrt(weight).

        Returns:
            Statistics of the step. Where the status is `"non_finite"`, or the step was `given_up`, no parameter was
            changed. With a `process_group` those of all samples, equal on all processes, but `gram` on rank 0 alone.

        Raises:
            ValueError: The closure breaks its contract, or a value in `param_groups` is out of range.
            RuntimeError: Autocast is on.
            SolveError: No solution was found; no parameter was changed.
            torch.OutOfMemoryError: J does not fit; the message holds an estimate and what to lower.
            RuntimeError: Another process of the group raised an error of another kind, or has ended.
        """
        if self._ranks is None:
            batch = self._batch(closure, terms)
            info = self._take(batch, self._linearise(batch))
        else:
            info = step_together(self, self._ranks, closure, terms)
        self._count(info)
        return info

    def _batch(self, closure: Closure | None, terms: Sequence[Term] | Term | None) -> StepBatch:
        """Return what a step is taken on, checked, with the state in which the model is."""
        trained = self._trained()
        settings = self._settings(trained)
        objective = None
        if terms is not None or not callable(closure):
            objective = self._objective(closure, terms, trained, settings)
            closure = objective.residual
        assert closure is not None
        device = next(iter(trained.params.values())).device
        check_modes(device)
        before = None if self._acceptance is None else Snapshot(self._model, device)
        return StepBatch(trained, settings, closure, objective, before)

    def _linearise(self, batch: StepBatch) -> Linearisation:
        """Return the residuals of a batch and their Jacobian."""
        with self._explained(batch), torch.enable_grad():
            if batch.objective is not None:
                return batch.objective.linearise()
            return self._engine.linearise(self._model, batch.trained, batch.closure, self._loss)

    def _take(self, batch: StepBatch, J: Linearisation, decide: Decide | None = None) -> StepInfo:
        """Take a step. `decide`: what decides in place of `_decide`."""
        trained = batch.trained
        with self._explained(batch, J.reading.residual), torch.no_grad():
            params = trained.params.values()
            previous = [self.state[p].get(DIRECTION) if p in self.state else None for p in params]
            model = linear_model(J, trained, previous, self.counts["steps"] + 1)
            outcome = (decide or self._decide)(model, batch)
            if outcome.step.finite and outcome.fraction > 0:
                add_step_(model, outcome.step, outcome.fraction)
            self._remember(model, outcome)
            info = report(model, outcome, self._loss)
            if batch.objective is not None:
                info = batch.objective.report(info)
        return info

    def _explained(self, batch: StepBatch, residual: Tensor | None = None) -> AbstractContextManager[None]:
        """Explain running out of memory."""
        advice = self._options["engine"].memory_advice if batch.objective is None else OF_TERMS
        return explained_out_of_memory(batch.trained.params, advice, residual)

    def _objective(
        self, closure: Closure | None, terms: Any, trained: Trained, settings: Settings
    ) -> Objective:
        """Return what a step on terms minimises."""
        if closure is not None or terms is None:
            given = "neither" if closure is None else "both" if terms is not None else type(closure).__name__
            raise ValueError(
                f"step needs either a closure or terms, got {given}: step(closure) or "
                "step(terms=[Term(residual, x), ...])"
            )
        if not isinstance(self._loss, SquaredError):
            raise ValueError(
                "terms are residuals of least squares: build the optimizer without loss='cross_entropy'"
            )
        return Objective(
            self._model,
            trained,
            check_terms(terms),
            settings.damping_convention,
            self._options["engine"],
            self._engine,
            self._memory,
        )

    def experimental_capture(self, residuals: Callable[..., Tensor], *example: Tensor) -> CapturedStep:
        """Capture steps on inputs of fixed shapes in two CUDA graphs; see `gramgn.optim.experimental.capture`."""
        from gramgn.optim.experimental import capture

        return capture(self, residuals, *example)

    def _decide(self, model: LinearModel, batch: StepBatch, trial: type[Trial] = Trial) -> Outcome:
        """Return the step to take, and the fraction of it. `trial`: evaluates the loss at trial points."""
        if self._acceptance is None or batch.before is None:
            return Outcome(propose(model, batch.settings, explicit=False))

        def proposed() -> Step:
            return propose(model, batch.settings.with_alpha(self.param_groups), explicit=True)

        at = trial(self._for_loss(batch), self._loss, model, batch.before)
        return self._acceptance.decide(proposed, lambda step: Line(at, step), self.param_groups)

    def _for_loss(self, batch: StepBatch) -> Closure:
        """Return the closure as it is called at trial points."""

        def closure() -> Any:
            with self._engine.evaluating(self._model, batch.trained):
                return batch.closure()

        return closure

    def _remember(self, model: LinearModel, outcome: Outcome) -> None:
        """Keep the part of d that was taken for momentum; a step that was given up is forgotten.

        Where a line search keeps shortening steps, momentum towards the whole d would pull past the valley each time.
        """
        if not outcome.step.finite:
            return
        self.state.clear()
        direction = outcome.step.direction
        if direction is not None and outcome.step.settings.momentum and not outcome.given_up:
            for param, d in zip(model.params, direction, strict=True):
                self.state[param][DIRECTION] = d if outcome.fraction == 1 else d * outcome.fraction

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
        for name in ("ill_conditioned", "rejected", "given_up"):
            self.counts[name] += int(getattr(info, name))

    def _trained(self) -> Trained:
        """Return the parameters to train in this step, by their names in the model, after checks of its modules."""
        grouped = [group["params"] for group in self.param_groups]
        objects = structure_of(self._model)
        for params in grouped:
            objects += (None, *params)

        def read() -> Trained:
            check_batch_statistics(self._model)
            return trainable(self._model, grouped, everything=self._everything)

        return self._kept.get(objects, read)

    def _settings(self, trained: Trained) -> Settings:
        """Return the hyper-parameters that the groups hold now, checked."""
        groups = self.param_groups
        values = [group[key] for group in groups for key in (*OF_GROUP, *OF_ALL)]
        self._checked.get([trained, *values], lambda: check_groups(groups, trained.groups))
        settings = read_settings(groups, min(trained.groups), self.counts["steps"])
        if self._acceptance is not None:
            self._acceptance.check(self.param_groups)
        return settings

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see the class for what may differ between groups.

        Args:
            param_group: As for every torch optimizer.

        Raises:
            ValueError: A key is unknown, a value is out of range, or differs where all groups share one.
        """
        check_new_group(param_group, self.defaults)
        check_shared([*self.param_groups, {**self.defaults, **param_group}])
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters, counts, directions and the engine's choices; the model is not part of it."""
        choices = self._engine.state_dict()
        return pack_state(super().state_dict(), self.counts, self._options["engine"].name, choices)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the next step is then bitwise the same.

        Args:
            state_dict: What `state_dict` of a `GramGaussNewton` returned.

        Raises:
            ValueError: It is the state of another optimizer, or of other parameters. Nothing was changed then.
        """
        name = self._options["engine"].name
        state, counts, choices = check_state(state_dict, self.param_groups, self.counts, name)
        if choices:
            if "kernels" in choices and not self._is_served():  # which are then used by neither
                choices = {**choices, "kernels": self._engine.state_dict()["kernels"]}
            self._engine.load_state_dict(choices)
        super().load_state_dict(state)
        self.counts = counts

    def __getstate__(self) -> dict[str, Any]:
        """Add model and engine to what torch keeps, so that the pair survives deepcopy and pickle."""
        own = (
            "_engine",
            "_memory",
            "_ranks",
            "_model",
            "_loss",
            "_acceptance",
            "_options",
            "_everything",
            "_kept",
            "_checked",
            "counts",
        )
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    def __repr__(self) -> str:
        """Show the options before torch's listing of the groups."""
        options = "".join(f"\n    {name}: {value}" for name, value in self._options.items())
        return super().__repr__().replace("(", f"({options}", 1)
