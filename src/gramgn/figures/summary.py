"""A table of finished runs for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gramgn.figures.curves import Comparison, Curve, compare, is_standardized, unit_of

_WIDTH = 80
_LABEL = 20
_COLUMNS = (("seed", 5), ("epochs", 7), ("train", 8), ("val", 8), ("test", 8), ("MAE", 7), ("s/epoch", 8))


def summary_table(rows: pd.DataFrame) -> str:
    """Return a table of runs at their last epoch, in lines of at most 80 characters.

    Losses are mean squared errors (of standardised targets, unless that was switched off); the MAE is that of the
    test split in the unit of the targets; seconds per epoch are training only.

    Args:
        rows: Finished runs, of `drawable`, on any number of data sets.
    """
    blocks = [_block(comparison) for comparison in compare(rows)]
    return "\n\n".join(blocks) + "\n"


def _block(comparison: Comparison) -> str:
    unit = unit_of(comparison.rows)
    loss_unit = "standardised" if is_standardized(comparison.rows) else f"{unit}²"
    lines = [
        _cut(comparison.title),
        _cut(f"loss: MSE, {loss_unit}; MAE: test, in {unit}; all at the last epoch"),
        _line("", [name for name, _ in _COLUMNS]),
        "-" * _WIDTH,
    ]
    for curve in comparison.curves:
        lines += _curve_lines(curve)
    return "\n".join(line.rstrip() for line in lines)


def _curve_lines(curve: Curve) -> list[str]:
    """Return a line per seed; a label that is too long for its column gets its own line."""
    last = curve.rows.drop_duplicates("run", keep="last").sort_values("seed", kind="stable")
    if len(curve.label) > _LABEL:
        return [_cut(curve.label), *(_run_line("", row) for _, row in last.iterrows())]
    return [
        _run_line(curve.label if place == 0 else "", row) for place, (_, row) in enumerate(last.iterrows())
    ]


def _run_line(label: str, last: pd.Series) -> str:
    epoch = 0 if pd.isna(last.epoch) else int(last.epoch)
    per_epoch = (0.0 if pd.isna(last.train_s) else last.train_s) / epoch if epoch else None
    numbers = [last[name] for name in ("train_loss", "val_loss", "test_loss", "test_mae")]
    cells = [
        _number(number, width) for number, (_, width) in zip([*numbers, per_epoch], _COLUMNS[2:], strict=True)
    ]
    line = _line(label, [str(last.seed), str(epoch), *cells])
    return f"{line} diverged" if last.state == "diverged" else line


def _line(label: str, cells: Sequence[str]) -> str:
    widths = [width for _, width in _COLUMNS]
    return label.ljust(_LABEL) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _number(value: float | None, width: int) -> str:
    """Return a number with at most three digits, fewer where it would touch the next column."""
    if value is None or pd.isna(value):
        return "-"
    texts = [f"{value:.3g}", f"{value:.2g}", f"{value:.1g}"]
    return next((text for text in texts if len(text) < width), texts[-1])


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
