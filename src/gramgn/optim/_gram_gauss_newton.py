"""The optimizer: Algorithm 1 of arXiv 1905.11675 as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramgn.optim._acceptance import Outcome
from gramgn.optim._adaptive import LevenbergMarquardt
from gramgn.optim._captured import CapturedClosure, CapturedEngine, CapturedStep, check_capturable
from gramgn.optim._info import NON_FINITE, STATUSES, WARNINGS, StepInfo
from gramgn.optim._line_search import Armijo
from gramgn.optim._options import make_acceptance, make_loss
from gramgn.optim._report import report
from gramgn.optim._settings import Settings, check_new_group, check_shared, read_settings
from gramgn.optim._state import DIRECTION, check_state, pack_state
from gramgn.optim._system import Step, System, add_step, linear_model, propose
from gramgn.optim._trial import Line, Trial
from gramgn.optim.closure import Closure, Trained, trainable
from gramgn.optim.engines import Loop, Stream, Vmap, engine_options
from gramgn.optim.guards import (
    check_batch_statistics,
    check_model,
    check_modes,
    check_process,
    note_device,
)
from gramgn.optim.runtime import RandomState, explained_out_of_memory, random_state

# What the paper's plain step has in place of each variant.
PLAIN: dict[str, Any] = {
    "momentum": 0.0,
    "weight_decay": 0.0,
    "decoupled_weight_decay": False,
    "damping_warmup_steps": 0,
    "damping_warmup_factor": 10.0,
    "max_step_norm": None,
}
COUNTS = ("steps", *STATUSES, "ill_conditioned", "rejected", "given_up")


class GramGaussNewton(torch.optim.Optimizer):
    """Gram-Gauss-Newton: a Gauss-Newton step through the b x b Gram matrix of a mini-batch.

    With residuals r = f - y of b samples, J their Jacobian with respect to the m trainable parameters::

        G = J J^T        u = (lam G + alpha I)^-1 r        w <- w - lr J^T u

    "GGN" means *Gram*-Gauss-Newton here, not the generalized Gauss-Newton matrix. In the words of others this
    is Levenberg-Marquardt with damping alpha / lam and step 1 / lam. The loss is mean(r^2), without a factor
    1/2::

        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
        for x, y in loader:
            info = optimizer.step(lambda: model(x) - y)

    Numbers live in ``param_groups``, where schedulers change them. ``lr``, ``alpha`` and ``weight_decay`` may differ
    between groups, by u = (lam sum_g G_g / beta_g + I)^-1 r and d_g = -J_g^T u / beta_g with beta_g = alpha_g +
    wd_g; the other values are shared. Parameters with ``requires_grad=False`` have no column in J and do not move.
    ``p.grad`` is not read or written. The optimizer holds the module itself: copy or pickle both together,
    ``copy.deepcopy((model, optimizer))``. On Apple's MPS, which has no float64, G is summed and the system solved
    on the CPU. Not part of ``state_dict``: model, loss, engine, ``adaptive_damping`` and ``line_search``.

    Args:
        model: The network. Each output must depend on its own sample only (no batch statistics).
        params: What to train: parameters of ``model``, or parameter groups; None: all that require gradients.
        lr: Factor on the step, >= 0; the method has none, so 1.
        lam: lambda of the paper, > 0; 1 there.
        alpha: alpha of the paper, >= 0; 0 for all groups is the minimum-norm step.
        damping_convention: ``"sum"``: alpha stands beside the sum J J^T, as the formula is printed.
            ``"mean"``: beside the mean J J^T / b, as the mean square loss suggests: alpha_sum = alpha b.
            ``"trace"``: relative to the mean eigenvalue of G, alpha_sum = alpha trace(G) / (b k), after Marquardt
            (1963), whose damping is relative to the curvature too.
        loss: ``"squared_error"``, or ``"cross_entropy"``: the closure returns logits [b, k] and labels [b], the step
            is d = -(lam C + alpha I)^-1 g with gradient g and generalised Gauss-Newton matrix C of the summed
            cross-entropy (the paper's future work; Schraudolph 2002).
        momentum: mu of SPRING (Goldshlager, Abrahamsen and Lin, arXiv 2401.10190), in [0, 1); 0.9 is recommended.
            The damping then pulls the step to mu times the last one instead of to 0. Without any damping there is
            nothing that pulls, so alpha = wd = 0 has no momentum.
        weight_decay: wd >= 0, beside the sum or the mean as alpha is (with ``"trace"``: the mean): the penalty
            1/2 wd |w + d|^2 is part of the system that is solved.
        decoupled_weight_decay: Take weight decay out of the system: w <- (1 - lr wd) w before the step, wd as it is
            (Loshchilov and Hutter 2019).
        adaptive_damping: None, or ``LevenbergMarquardt(...)``, which lets alpha follow the ratio of actual and
            predicted decrease. A mapping of its fields will do.
        damping_warmup_steps: In so many first steps alpha is larger. 0: none.
        damping_warmup_factor: By so much at first, >= 1, falling geometrically.
        max_step_norm: A longer step lr d is scaled to this Euclidean norm over all parameters (as SPRING does);
            None: none is.
        line_search: None, ``"armijo"`` or ``Armijo(...)``: backtracking from lr. A mapping of its fields will do.
        engine: How J is formed. `"stream"` (default) or `Stream(...)`: layer by layer in one backward pass;
            `"vmap"` or `Vmap(...)`: by `torch.func`; `"loop"` or `Loop()`: one backward pass per row, for tests and
            unusual networks. A mapping of `name` and the fields of these is accepted too.

    Attributes:
        counts: How often: ``steps`` in all, each status of ``StepInfo``, ``ill_conditioned``, tries ``rejected`` and
            steps ``given_up``.

    Raises:
        ValueError: A value is out of range; nothing to train, or foreign parameters; parameter groups that do not go
            together; batch statistics in training mode; a compiled or wrapped model.
        RuntimeError: Autocast is on, or this process is one of several (WORLD_SIZE > 1).
    """

    takes_model = True
    """Built from the module itself, with a closure of the residuals: what a training loop may ask a class."""

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1.0,
        lam: float,
        alpha: float,
        damping_convention: str = "sum",
        loss: str = "squared_error",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        adaptive_damping: LevenbergMarquardt | Mapping[str, Any] | None = None,
        damping_warmup_steps: int = 0,
        damping_warmup_factor: float = 10.0,
        max_step_norm: float | None = None,
        line_search: Armijo | Mapping[str, Any] | str | None = None,
        engine: str | Stream | Vmap | Loop | Mapping[str, Any] = "stream",
    ) -> None:
        check_process()
        check_model(model)
        defaults = {
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
        }
        check_new_group({}, defaults)
        options = engine_options(engine)
        self._engine = options.build()
        self._loss = make_loss(loss)
        if isinstance(options, Stream) and options.low_memory and loss == "cross_entropy":
            raise ValueError(
                "low_memory=True needs one residual per sample, and loss='cross_entropy' has one per class: "
                "set low_memory to False"
            )
        self._acceptance = make_acceptance(adaptive_damping, line_search)
        self._options: dict[str, Any] = {"loss": loss, "acceptance": self._acceptance, "engine": options}
        self._model = model
        self._everything = params is None
        self.counts = dict.fromkeys(COUNTS, 0)
        if params is None:
            params = [param for param in model.parameters() if param.requires_grad]
            if not params:
                raise ValueError(
                    f"{type(model).__name__} has no parameter that requires a gradient: nothing to train"
                )
        super().__init__(params, defaults)
        trained = self._trained()
        self._settings(trained)
        device = next(iter(trained.params.values())).device
        check_modes(device)
        note_device(device)

    def step(self, closure: Closure) -> StepInfo:  # type: ignore[override]
        """Take one step on one mini-batch.

        Args:
            closure: Calls the model exactly once, on the whole batch, and returns the residuals f - y, [b] or
                [b, k] (for cross-entropy: logits [b, k] and labels [b]). It is called once, and with
                ``adaptive_damping`` or ``line_search`` again for each trial point, with the same random numbers of
                torch. The first tensor that the model is called with holds the samples in its leading dimension; so
                does every other tensor of that leading size, the rest is shared.

        Returns:
            What happened. Where the status is ``"non_finite"``, or the step was ``given_up``, no parameter was
            changed.

        Raises:
            ValueError: The closure breaks its contract, or a value in ``param_groups`` is out of range.
            RuntimeError: Autocast is on.
            SolveError: No solution was found; no parameter was changed.
            torch.OutOfMemoryError: J does not fit; the message holds an estimate and what to lower.
        """
        trained = self._trained()
        self._settings(trained)
        params = list(trained.params.values())
        check_batch_statistics(self._model)
        check_modes(params[0].device)

        before = {} if self._acceptance is None else random_state(params[0].device)
        with explained_out_of_memory(trained.params), torch.enable_grad():
            engine = closure.engine if isinstance(closure, CapturedClosure) else self._engine
            J = engine.linearise(self._model, trained, closure, self._loss)
        with explained_out_of_memory(trained.params, J.reading.residual), torch.no_grad():
            previous = [self.state[p].get(DIRECTION) if p in self.state else None for p in params]
            system = linear_model(J, trained, previous, self.counts["steps"] + 1)
            outcome = self._decide(system, closure, before)
            if outcome.step.finite and outcome.fraction > 0:
                add_step(system, outcome.step, outcome.fraction)
            self._remember(system, outcome)
            info = report(system, outcome, self._loss)
        self._count(info)
        return info

    def capture(self, residuals: Callable[..., Tensor], *example: Tensor) -> CapturedStep:
        """Capture steps on inputs of fixed shapes in two CUDA graphs: forward to Gram matrix, and J^T u.

        They do the same work without launching every kernel from Python; solving and everything that is decided
        by its outcome stays eager. What Python does in the network and in ``residuals`` is done once, now::

            step = optimizer.capture(lambda x, y: model(x) - y, x, y)
            info = step(x, y)

        Args:
            residuals: From the inputs to the residuals [b] or [b, k]; calls the model exactly once.
            *example: Inputs of the shapes and dtypes to come, on the network's device; they are copied.

        Returns:
            A function of such inputs that takes a step and returns its ``StepInfo``.

        Raises:
            ValueError: The network is not on a CUDA device, or an option cannot be captured: another engine or
                loss than the default ones, ``chunk_size``, ``low_memory``.
        """
        trained = self._trained()
        device = next(iter(trained.params.values())).device
        engine = CapturedEngine(check_capturable(self._engine, self.loss, device), residuals, example)
        check_batch_statistics(self._model)
        check_modes(device)
        with explained_out_of_memory(trained.params), torch.enable_grad():
            engine.prepare(self._model, trained, self._loss)
        return CapturedStep(self.step, engine)

    @property
    def loss(self) -> str:
        """The name of the loss, which tells what closures return."""
        return str(self._options["loss"])

    def _decide(self, system: System, closure: Closure, before: RandomState) -> Outcome:
        """Return the step to take, and how much of it."""

        def proposed() -> Step:
            settings = self._settings(system.trained)
            return propose(system, settings, explicit=self._acceptance is not None)

        if self._acceptance is None:
            return Outcome(proposed())
        trial = Trial(closure, self._loss, system, before)
        return self._acceptance.decide(
            proposed, lambda step: Line(system, step, self._loss, trial), self.param_groups
        )

    def _remember(self, system: System, outcome: Outcome) -> None:
        """Keep d for momentum. A step that was given up forgets it: in its stead no damping would shorten d."""
        if not outcome.step.finite:
            return
        self.state.clear()
        direction = outcome.step.direction
        if direction is not None and outcome.step.settings.momentum and not outcome.given_up:
            for param, d in zip(system.params, direction, strict=True):
                self.state[param][DIRECTION] = d

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
        """Return the parameters to train in this step, by their names in the model."""
        grouped = [group["params"] for group in self.param_groups]
        return trainable(self._model, grouped, everything=self._everything)

    def _settings(self, trained: Trained) -> Settings:
        """Return the hyper-parameters that stand in the groups now, checked."""
        settings = read_settings(self.param_groups, sorted(set(trained.groups)), self.counts["steps"])
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
        """Take over what ``state_dict`` returned; the next step is then bitwise the same.

        Args:
            state_dict: What ``state_dict`` of a ``GramGaussNewton`` returned.

        Raises:
            ValueError: It is the state of another optimizer, or of other parameters. Nothing was changed then.
        """
        saved = check_state(state_dict, self.param_groups, PLAIN, self.counts, self._options["engine"].name)
        if saved.choices:
            self._engine.load_state_dict(saved.choices)
        super().load_state_dict(saved.state)
        self.counts = saved.counts

    def __getstate__(self) -> dict[str, Any]:
        """Keep model and engine beside what torch keeps, so that the pair survives deepcopy and pickle."""
        own = ("_engine", "_model", "_loss", "_acceptance", "_options", "_everything", "counts")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    def __repr__(self) -> str:
        """Show the options beside torch's listing of the groups."""
        options = "".join(f"\n    {name}: {value}" for name, value in self._options.items())
        return super().__repr__().replace("(", f"({options}", 1)
