"""What the theory's studies measured: runs of the two-layer network, and the cost of the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import pandas as pd

from gramgn.errors import InputError
from gramgn.theory.rates import FLOOR, contraction, last_order, quadratic_constants

STUDIES_OF_RUNS = ("quadratic", "cyclic", "methods")
COMMAND = "make theory"
COST_FILE = "theory_cost.csv"


@dataclass(frozen=True)
class Setting:
    """The settings of one run of the two-layer network.

    Attributes:
        study: `"quadratic"`, `"cyclic"` or `"methods"`.
        method: `"ggn"` or `"gradient_descent"`.
        order: `"cyclic"` or `"shuffle"`.
        dataset: Its name.
        kind: `"synthetic"` or `"real"`.
        activation: sigma.
        n: Number of samples.
        d: Number of features.
        M: Width.
        b: Number of samples in a batch.
        lam: lambda; None for gradient descent.
        alpha: In the sum convention; None for gradient descent.
        seed: Of data and network.
        epochs: T.
        kernel_gap: |G_0 - K|, spectral.
        rho: Predicted contraction per epoch on the linearised network; None in random order.
    """

    study: str
    method: str
    order: str
    dataset: str
    kind: str
    activation: str
    n: int
    d: int
    M: int
    b: int
    lam: float | None
    alpha: float | None
    seed: int
    epochs: int
    kernel_gap: float
    rho: float | None


@dataclass(frozen=True)
class Epoch:
    """The network at one time of a run, see `gramgn.theory.PathPoint`.

    Attributes:
        epoch: 0 at the start.
        residual: |f - y|.
        linear_residual: The same on the linearised network; None where there is no prediction.
        drift_J: |J - J_0|, Frobenius.
        drift_G: |G - G_0|, spectral.
    """

    epoch: int
    residual: float
    linear_residual: float | None
    drift_J: float  # noqa: N815 - the paper's symbol
    drift_G: float  # noqa: N815


@dataclass(frozen=True)
class TheoryRun:
    """One run.

    Attributes:
        setting: What it was.
        epochs: What was measured, in order, the first at the start and the last after `setting.epochs`.
    """

    setting: Setting
    epochs: tuple[Epoch, ...]

    @property
    def residuals(self) -> list[float]:
        """|f - y| at the measured epochs."""
        return [each.residual for each in self.epochs]

    @cached_property
    def order_of_convergence(self) -> float | None:
        """The last step's order above rounding; None if too few residuals are."""
        try:
            return last_order(self.residuals)
        except ValueError:
            return None

    @property
    def constant(self) -> float | None:
        """|f_2 - y| / |f_1 - y|^2: C / sqrt M of Theorem 1, the first step left out as in the order.

        None if the residual is 0 by then: there is nothing left to divide.
        """
        if min(self.residuals[1:3]) <= 0:
            return None
        return quadratic_constants(self.residuals, floor=0.0)[1]

    def remaining(self, epoch: int) -> float | None:
        """Return |f - y| / |f_0 - y| after some epochs; None if that epoch was not recorded."""
        found = (each.residual for each in self.epochs if each.epoch == epoch)
        residual = next(found, None)
        return None if residual is None else residual / self.epochs[0].residual

    @cached_property
    def contraction(self) -> float | None:
        """The contraction an epoch over the second half of the epochs; None if that is rounding."""
        return _contraction(self.residuals, self._epochs_a_row)

    @cached_property
    def linear_contraction(self) -> float | None:
        """That of the linearised network over the same epochs; None without a prediction."""
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
class Cost:
    """What one step cost in one round, in seconds, and the multiply-adds that its parts need; see `benchmarks/cost.py`.

    Attributes:
        network: e.g. `"resnet32"`: ResNetFixup.
        pixels: Height and width of the images of noise.
        b: Number of samples in the batch.
        m: Number of trainable parameters.
        round: Counted from 1; all shapes take their turn in each.
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
    """

    network: str
    pixels: int
    b: int
    m: int
    round: int
    step_s: float
    forward_s: float
    backward_s: float
    blocks_s: float
    gram_s: float
    solve_s: float
    update_s: float
    sgd_s: float
    forward_ops: float
    gram_ops: float
    solve_ops: float
    device: str

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
    """What the studies measured.

    Attributes:
        runs: Runs of the two-layer network.
        costs: Rows of the cost study.
    """

    runs: tuple[TheoryRun, ...] = ()
    costs: tuple[Cost, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.runs or self.costs)

    def study(self, name: str) -> list[TheoryRun]:
        """Return the runs of a study."""
        return [run for run in self.runs if run.setting.study == name]


def is_of_study(table: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows of the table of runs belong to a study: those of the sweeps `theory_<study>`."""
    return table.sweep.isin([f"theory_{study}" for study in STUDIES_OF_RUNS])


def runs_of_theory(table: pd.DataFrame, report: Callable[[str], None]) -> tuple[TheoryRun, ...]:
    """Return the finished runs of the studies, of repeated ones the newest.

    All runs of a study must be on the same data with the same activation, and the seeds of one line be measured at the
    same epochs: where they are not, those like the newest are taken.

    Args:
        table: Of `gramgn.records.runs`.
        report: Called with one line for what is left out.
    """
    found: dict[tuple[object, ...], TheoryRun] = {}
    rows = table[is_of_study(table) & (table.state == "done") & table.residual.notna()]
    for _, own in rows.sort_values(["began", "epoch"], na_position="first").groupby(
        ["source", "run"], sort=False
    ):
        run = _run(own)
        of = run.setting
        key = (*_line(run), of.seed, *_data(run))
        found.pop(key, None)  # so that the newest comes last
        found[key] = run
    newest = {run.setting.study: _data(run) for run in found.values()}
    kept = [run for run in found.values() if _data(run) == newest[run.setting.study]]
    epochs = {_line(run): [each.epoch for each in run.epochs] for run in kept}
    kept = [run for run in kept if [each.epoch for each in run.epochs] == epochs[_line(run)]]
    if others := len(found) - len(kept):
        report(
            f"left out {others} runs of the theory's studies: on other data, with another activation, or measured at "
            "other epochs than the newest"
        )
    return tuple(kept)


def _line(run: TheoryRun) -> tuple[object, ...]:
    """Return what the seeds of one line in a figure have in common."""
    of = run.setting
    return of.study, of.method, of.order, of.M, of.b, of.lam, of.alpha


def _data(run: TheoryRun) -> tuple[object, ...]:
    of = run.setting
    return of.dataset, of.kind, of.activation, of.n, of.d


def _run(rows: pd.DataFrame) -> TheoryRun:
    first = rows.iloc[0]
    is_ggn = pd.notna(first.lam)
    setting = Setting(
        study=first.sweep.removeprefix("theory_"),
        method=first.optimizer,
        order=first.order,
        dataset=first.dataset,
        kind=first.kind,
        activation=first.activation,
        n=int(first.n),
        d=int(first.d),
        M=int(first.M),
        b=int(first.n) if first.batch_size == "full" else int(first.batch_size),
        lam=float(first.lam) if is_ggn else None,
        alpha=float(first.alpha_sum) if is_ggn else None,
        seed=int(first.seed),
        epochs=int(first.epochs),
        kernel_gap=float(first.kernel_gap),
        rho=_optional(first.rho),
    )
    epochs = zip(rows.epoch, rows.residual, rows.linear_residual, rows.drift_J, rows.drift_G, strict=True)
    return TheoryRun(
        setting,
        tuple(
            Epoch(int(epoch), float(residual), _optional(linear), float(drift_J), float(drift_G))
            for epoch, residual, linear, drift_J, drift_G in epochs
        ),
    )


def _optional(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def is_cost_file(path: Path) -> bool:
    """Return whether a CSV is one of `benchmarks/cost.py`, by its first line."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(1000).startswith("network,pixels,b,m,round,")
    except (OSError, UnicodeDecodeError):
        return False


def read_costs(path: Path) -> tuple[Cost, ...]:
    """Read a file of `benchmarks/cost.py`.

    Raises:
        InputError: The file is missing, cut or lacks a column.
    """
    names = [field.name for field in fields(Cost)]
    try:
        table = pd.read_csv(path)[names]
        if table.isna().any(axis=None):
            raise ValueError("a cell is empty")
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{path} is not a file of costs ({error}); measure again with python benchmarks/cost.py"
        ) from error
    return tuple(
        Cost(**{str(name): value for name, value in row.items()}) for row in table.to_dict("records")
    )
