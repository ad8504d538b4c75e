"""A table of finished runs for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gramgn.records import Row

from ._group import Comparison, Curve, compare
from ._run import Run

_WIDTH = 80
_LABEL = 20
_COLUMNS = (("seed", 5), ("epochs", 7), ("train", 8), ("val", 8), ("test", 8), ("MAE", 7), ("s/epoch", 8))


def summary_table(runs: Iterable[Run]) -> str:
    """Return a table of runs at their last epoch, in lines of at most 80 characters.

    Losses are mean squared errors (of standardised targets, unless that was switched off); the MAE is that of
    the test split in the unit of the targets; seconds an epoch are training only.

    Args:
        runs: Runs that can be shown, of any number of data sets.
    """
    blocks = [_block(comparison) for comparison in compare(runs)]
    return "\n\n".join(blocks) + "\n"


def _block(comparison: Comparison) -> str:
    unit = "standardised" if comparison.standardised else f"{comparison.unit}²"
    lines = [
        _cut(comparison.title),
        _cut(f"loss: MSE, {unit}; MAE: test, in {comparison.unit}; all at the last epoch"),
        _line("", [name for name, _ in _COLUMNS]),
        "-" * _WIDTH,
    ]
    for curve in comparison.curves:
        lines += _curve_lines(curve)
    return "\n".join(line.rstrip() for line in lines)


def _curve_lines(curve: Curve) -> list[str]:
    """Return a line for each seed; a label that is too long for its column stands on a line of its own."""
    runs = sorted(curve.runs, key=lambda run: (len(run.seed), run.seed))
    if len(curve.label) > _LABEL:
        return [_cut(curve.label), *(_run_line("", run) for run in runs)]
    return [_run_line(curve.label if place == 0 else "", run) for place, run in enumerate(runs)]


def _run_line(label: str, run: Run) -> str:
    last: Row = run.rows[-1] if run.rows else {}
    epoch = int(last.get("epoch") or 0)
    per_epoch = float(last.get("train_s") or 0.0) / epoch if epoch else None
    numbers = [last.get(name) for name in ("train_loss", "val_loss", "test_loss", "test_mae")]
    cells = [
        _number(number, width) for number, (_, width) in zip([*numbers, per_epoch], _COLUMNS[2:], strict=True)
    ]
    line = _line(label, [run.seed, str(epoch), *cells])
    return f"{line} diverged" if run.diverged else line


def _line(label: str, cells: Sequence[str]) -> str:
    widths = [width for _, width in _COLUMNS]
    return label.ljust(_LABEL) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _number(value: float | None, width: int) -> str:
    """Return a number with as many digits, at most three, as leave a space between the columns."""
    if value is None:
        return "-"
    texts = [f"{value:.3g}", f"{value:.2g}", f"{value:.1g}"]
    return next((text for text in texts if len(text) < width), texts[-1])


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
