"""The theory's files: runs of the two-layer network, a row a run and epoch, and the cost of the parts of a step."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from gramgn.errors import InputError
from gramgn.theory.rates import FLOOR, contraction, last_order, quadratic_constants
from gramgn.tracking.records import write_atomic

FOLDER = "theory"
"""Below ``outputs/``: where ``make theory`` writes and plain ``make figures`` looks."""


def _whole(cell: str) -> int:
    if (value := int(cell)) < 0:
        raise ValueError(f"{cell} is below zero")
    return value


def _number(cell: str) -> float:
    if not math.isfinite(value := float(cell)):
        raise ValueError(f"{cell} is not a finite number")
    return value


def _size(cell: str) -> float:
    if (value := _number(cell)) < 0:
        raise ValueError(f"{cell} is below zero")
    return value


def _maybe(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    return lambda cell: parse(cell) if cell else None


def _word(cell: str) -> str:
    if not cell:
        raise ValueError("it is empty")
    return cell


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(cell: str) -> str:
        if cell not in allowed:
            raise ValueError(f"{cell!r} is not one of {', '.join(allowed)}")
        return cell

    return parse


_method, _order = _one_of("ggn", "gd"), _one_of("cyclic", "shuffle")


def _column(parse: Callable[[str], Any] = _word) -> Any:
    return field(metadata={"parse": parse})


class _Record:
    """A row of a file, whose columns are the fields of the class."""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the columns, in their order."""
        return tuple(each.name for each in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def parse(cls, cells: Sequence[str], place: str) -> Self:
        """Return the row that cells stand for.

        Raises:
            InputError: A cell cannot be; the message says where and why.
        """
        values = {}
        for each, cell in zip(fields(cls), cells, strict=True):  # type: ignore[arg-type]
            try:
                values[each.name] = each.metadata["parse"](cell)
            except ValueError as error:
                raise InputError(f"{place}, column {each.name}: {error}") from error
        return cls(**values)

    def cells(self) -> list[str]:
        """Return the row as text."""
        return [_text(getattr(self, name)) for name in self.columns()]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Setting(_Record):
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

    study: str = _column()
    method: str = _column(_method)
    order: str = _column(_order)
    dataset: str = _column()
    kind: str = _column()
    activation: str = _column()
    n: int = _column(_whole)
    d: int = _column(_whole)
    M: int = _column(_whole)
    b: int = _column(_whole)
    lam: float | None = _column(_maybe(_size))
    alpha: float | None = _column(_maybe(_size))
    lr: float | None = _column(_maybe(_size))
    seed: int = _column(_whole)
    epochs: int = _column(_whole)
    lambda_0: float = _column(_number)
    kernel_gap: float = _column(_size)
    rho: float | None = _column(_maybe(_size))
    device: str = _column()
    torch: str = _column()
    git: str = _column()


@dataclass(frozen=True)
class Epoch(_Record):
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

    epoch: int = _column(_whole)
    residual: float = _column(_size)
    linear_residual: float | None = _column(_maybe(_size))
    distance: float = _column(_size)
    drift_J: float = _column(_size)  # noqa: N815 - the paper's symbol
    drift_J_row: float = _column(_size)  # noqa: N815
    drift_G: float = _column(_size)  # noqa: N815


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
    def constant(self) -> float:
        """|f_2 - y| / |f_1 - y|^2: C / sqrt M of Theorem 1, the first step left out as in the order."""
        return quadratic_constants(self.residuals, floor=0.0)[1]

    @cached_property
    def contraction(self) -> float | None:
        """The contraction an epoch over the second half of the epochs; ``None`` if that is rounding."""
        return _contraction(self.residuals, self._epochs_a_row)

    @cached_property
    def linear_contraction(self) -> float | None:
        """That of the linearised network over the same epochs; ``None`` without a prediction."""
        linear = [each.linear_residual for each in self.epochs if each.linear_residual is not None]
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
class Cost(_Record):
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

    network: str = _column()
    pixels: int = _column(_whole)
    b: int = _column(_whole)
    m: int = _column(_whole)
    round: int = _column(_whole)
    step_s: float = _column(_size)
    forward_s: float = _column(_size)
    backward_s: float = _column(_size)
    blocks_s: float = _column(_size)
    gram_s: float = _column(_size)
    solve_s: float = _column(_size)
    update_s: float = _column(_size)
    sgd_s: float = _column(_size)
    forward_ops: float = _column(_size)
    gram_ops: float = _column(_size)
    solve_ops: float = _column(_size)
    device: str = _column()
    torch: str = _column()
    git: str = _column()

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


def is_theory_file(path: Path) -> bool:
    """Tell by its first line whether a file is one of the theory's; a file that cannot be read is none."""
    try:
        with path.open(encoding="utf-8") as file:
            head = file.readline()
    except (OSError, UnicodeDecodeError):
        return False
    return head.startswith((Setting.columns()[0] + ",", Cost.columns()[0] + ","))


def find_theory(folder: Path) -> list[Path]:
    """Return the theory's files that ``make theory`` wrote into ``theory/`` of a folder such as ``outputs/``."""
    own = folder if folder.name == FOLDER else folder / FOLDER
    return [path for path in sorted(own.glob("*.csv")) if is_theory_file(path)]


def read_theory(paths: Iterable[Path]) -> Theory:
    """Read the theory's files and check them against their columns.

    Args:
        paths: CSV files of :func:`write_theory`.

    Raises:
        InputError: A file is missing, cut, or not of this kind; the message names file, line and column.
    """
    runs: dict[Setting, TheoryRun] = {}
    costs: list[Cost] = []
    for path in paths:
        names, lines = _lines(path)
        if names == Theory.COST_COLUMNS:
            costs += [Cost.parse(cells, place) for cells, place in lines]
        elif names == Theory.RUN_COLUMNS:
            runs |= {run.setting: run for run in _runs(lines)}
        else:
            unknown = [name for name in names if name not in {*Theory.RUN_COLUMNS, *Theory.COST_COLUMNS}]
            raise InputError(
                f"{path} is not a file of the theory: its columns are others"
                + (f" ({', '.join(map(repr, unknown[:5]))})" if unknown else "")
                + "; scripts/theory.py writes them, outputs/results/README.md describes them"
            )
    return Theory(tuple(runs.values()), tuple(costs))


def write_theory(theory: Theory, path: Path) -> None:
    """Write runs, or else costs, to a file.

    Args:
        theory: Runs alone or costs alone.
        path: The CSV file, replaced atomically; its folder must exist.

    Raises:
        ValueError: Both runs and costs.
        InputError: The file cannot be written.
    """
    if theory.runs and theory.costs:
        raise ValueError("runs and costs have different columns: write two files")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Theory.COST_COLUMNS if theory.costs else Theory.RUN_COLUMNS)
    for run in theory.runs:
        writer.writerows([*run.setting.cells(), *each.cells()] for each in run.epochs)
    writer.writerows(cost.cells() for cost in theory.costs)
    write_atomic(path, text.getvalue())


def _lines(path: Path) -> tuple[tuple[str, ...], Iterator[tuple[list[str], str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if text and not text.endswith("\n"):
        raise InputError(f"{path} is cut in mid-line; remove it and repeat: python scripts/theory.py")
    lines = csv.reader(io.StringIO(text))
    names = tuple(next(lines, []))

    def rest() -> Iterator[tuple[list[str], str]]:
        for cells in lines:
            place = f"{path}, line {lines.line_num}"
            if len(cells) != len(names):
                raise InputError(f"{place}: {len(cells)} cells, expected {len(names)}")
            yield cells, place

    return names, rest()


def _runs(lines: Iterator[tuple[list[str], str]]) -> Iterator[TheoryRun]:
    width = len(Setting.columns())
    found: dict[Setting, list[Epoch]] = {}
    last = ""
    for cells, last in lines:
        setting, epoch = Setting.parse(cells[:width], last), Epoch.parse(cells[width:], last)
        rows = found.setdefault(setting, [])
        if epoch.epoch <= (rows[-1].epoch if rows else -1) or (not rows and epoch.epoch):
            raise InputError(f"{last}: epoch {epoch.epoch} is doubled, out of order, or the first is missing")
        rows.append(epoch)
    for setting, rows in found.items():
        if len(rows) < 3 or rows[-1].epoch != setting.epochs:
            raise InputError(
                f"{last.rpartition(', line')[0]}: a run of {setting.study} with M = {setting.M}, seed {setting.seed} "
                f"ends at epoch {rows[-1].epoch} of {setting.epochs}; remove the file and repeat: "
                "python scripts/theory.py"
            )
        yield TheoryRun(setting, tuple(rows))
