"""What the theory's studies measured: runs of the two-layer network, and the cost of the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gramgn.theory.rates import FLOOR, contraction, last_order, quadratic_constants

from ._columns import Record, column, count, maybe, number, one_of, positive, rate, size, whole

STUDIES_OF_RUNS = ("quadratic", "cyclic", "methods")
_method, _order = one_of("ggn", "gd"), one_of("cyclic", "shuffle")


@dataclass(frozen=True)
class Setting(Record):
    """What one run of the two-layer network was.

    Attributes:
        study: ``"quadratic"``, ``"cyclic"`` or ``"methods"``.
        method: ``"ggn"`` or ``"gd"`` (gradient descent).
        order: ``"cyclic"`` or ``"shuffle"``.
        dataset: Its name, with the kind of targets.
        kind: ``"synthetic"`` or ``"real"``.
        activation: sigma.
        n: Samples.
        d: Features.
        M: Width.
        b: Samples in a batch.
        lam: lambda; ``None`` for gradient descent.
        alpha: Beside the sum J J^T; ``None`` for gradient descent.
        lr: eta; ``None`` for GGN.
        seed: Of data and network.
        epochs: T.
        lambda_0: Least eigenvalue of the limit kernel K.
        kernel_gap: |G_0 - K|, spectral.
        rho: Predicted contraction an epoch on the linearised network; ``None`` for random order.
        device: Name of the processor or card.
        torch: Version of PyTorch.
        git: Commit, with ``+`` behind it if there were changes.
    """

    study: str = column(one_of(*STUDIES_OF_RUNS))
    method: str = column(_method)
    order: str = column(_order)
    dataset: str = column()
    kind: str = column(one_of("synthetic", "real"))
    activation: str = column()
    n: int = column(count)
    d: int = column(count)
    M: int = column(count)
    b: int = column(count)
    lam: float | None = column(maybe(positive))
    alpha: float | None = column(maybe(size))
    lr: float | None = column(maybe(positive))
    seed: int = column(whole)
    epochs: int = column(count)
    lambda_0: float = column(number)
    kernel_gap: float = column(size)
    rho: float | None = column(maybe(rate))
    device: str = column()
    torch: str = column()
    git: str = column()

    @property
    def case(self) -> tuple[object, ...]:
        """What was run, the seed included, whatever machine and code ran it and whatever was measured."""
        data = (self.dataset, self.kind, self.activation, self.n, self.d)
        of = (self.study, self.method, self.order, *data, self.M, self.b, self.lam, self.alpha)
        return (*of, self.seed, self.epochs)


@dataclass(frozen=True)
class Epoch(Record):
    """The network at one time of a run; all numbers without a unit but for the residual's, that of the targets.

    Attributes:
        epoch: 0 at the start.
        residual: |f - y|.
        linear_residual: The same on the linearised network; ``None`` for random order.
        distance: R = |W - W_0|, Frobenius.
        drift_J: |J - J_0|, Frobenius.
        drift_J_row: The largest |J_i - J_0,i| of a row.
        drift_G: |G - G_0|, spectral.
    """

    epoch: int = column(whole)
    residual: float = column(size)
    linear_residual: float | None = column(maybe(size))
    distance: float = column(size)
    drift_J: float = column(size)  # noqa: N815 - the paper's symbol
    drift_J_row: float = column(size)  # noqa: N815
    drift_G: float = column(size)  # noqa: N815


@dataclass(frozen=True)
class TheoryRun:
    """One run.

    Attributes:
        setting: What it was.
        epochs: What was measured, in order, the first at the start and the last after ``setting.epochs``.
    """

    setting: Setting
    epochs: tuple[Epoch, ...]

    @property
    def residuals(self) -> list[float]:
        """|f - y| at the recorded epochs."""
        return [each.residual for each in self.epochs]

    @cached_property
    def order_of_convergence(self) -> float | None:
        """The last step's order above rounding; ``None`` if too few residuals are."""
        try:
            return last_order(self.residuals)
        except ValueError:
            return None

    @property
    def constant(self) -> float | None:
        """|f_2 - y| / |f_1 - y|^2: C / sqrt M of Theorem 1, the first step left out as in the order.

        ``None`` if the residual is 0 by then: there is nothing left to divide.
        """
        if min(self.residuals[1:3]) <= 0:
            return None
        return quadratic_constants(self.residuals, floor=0.0)[1]

    def remaining(self, epoch: int) -> float | None:
        """Return |f - y| / |f_0 - y| after some epochs; ``None`` if that epoch was not recorded."""
        found = (each.residual for each in self.epochs if each.epoch == epoch)
        residual = next(found, None)
        return None if residual is None else residual / self.epochs[0].residual

    @cached_property
    def contraction(self) -> float | None:
        """The contraction an epoch over the second half of the epochs; ``None`` if that is rounding."""
        return _contraction(self.residuals, self._epochs_a_row)

    @cached_property
    def linear_contraction(self) -> float | None:
        """That of the linearised network over the same epochs; ``None`` without a prediction."""
        linear = [each.linear_residual or 0.0 for each in self.epochs]
        above = next((t for t, value in enumerate(self.residuals) if not value > FLOOR), len(self.residuals))
        return _contraction(linear[:above], self._epochs_a_row)

    @property
    def _epochs_a_row(self) -> int:
        return self.epochs[1].epoch - self.epochs[0].epoch


def _contraction(residuals: Sequence[float], epochs_a_row: int) -> float | None:
    try:
        return contraction(residuals) ** (1 / epochs_a_row)
    except ValueError:
        return None


@dataclass(frozen=True)
class Cost(Record):
    """What one step cost in one round, in seconds, beside the multiply-adds that its parts need.

    Attributes:
        network: e.g. ``"resnet32"``: ResNetFixup.
        pixels: Height and width of the images, of noise.
        b: Samples in the batch.
        m: Trainable parameters.
        round: Counted from 1; all settings take their turn in each.
        step_s: Our step, of which the next six are parts.
        forward_s: Forward pass: of (A) in the paper.
        backward_s: Backward pass to the layers' outputs: of (A).
        blocks_s: Blocks of J: of (A).
        gram_s: Gram products: of (B).
        solve_s: Solving the system [b, b]: of (B).
        update_s: J^T u and the update.
        sgd_s: A step of SGD with momentum, in the same round.
        forward_ops: Multiply-adds of the forward pass.
        gram_ops: b^2 m, of the Gram product without use of its symmetry.
        solve_ops: b^3 / 3.
        device: Name of the processor or card, with the number of threads.
        torch: Version of PyTorch.
        git: Commit, with ``+`` behind it if there were changes.
    """

    network: str = column()
    pixels: int = column(count)
    b: int = column(count)
    m: int = column(count)
    round: int = column(count)
    step_s: float = column(positive)
    forward_s: float = column(size)
    backward_s: float = column(size)
    blocks_s: float = column(size)
    gram_s: float = column(size)
    solve_s: float = column(size)
    update_s: float = column(size)
    sgd_s: float = column(positive)
    forward_ops: float = column(positive)
    gram_ops: float = column(positive)
    solve_ops: float = column(positive)
    device: str = column()
    torch: str = column()
    git: str = column()

    @property
    def part_A_s(self) -> float:  # noqa: N802 - the paper's name
        """Forward pass and per-sample backward pass."""
        return self.forward_s + self.backward_s + self.blocks_s

    @property
    def part_B_s(self) -> float:  # noqa: N802
        """Gram product and solve."""
        return self.gram_s + self.solve_s


@dataclass(frozen=True)
class Theory:
    """What the theory's files hold.

    Attributes:
        runs: Runs of the two-layer network.
        costs: Rows of the cost study.
    """

    RUN_COLUMNS: ClassVar[tuple[str, ...]] = (*Setting.columns(), *Epoch.columns())
    COST_COLUMNS: ClassVar[tuple[str, ...]] = Cost.columns()

    runs: tuple[TheoryRun, ...] = ()
    costs: tuple[Cost, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether there is anything."""
        return bool(self.runs or self.costs)

    def study(self, name: str) -> list[TheoryRun]:
        """Return the runs of a study."""
        return [run for run in self.runs if run.setting.study == name]
