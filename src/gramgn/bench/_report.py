"""Tables for a terminal or for Markdown, and rows for a CSV file."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gramgn.bench._breakdown import PARTS
from gramgn.bench._kernels import GRAM, SUMMED, least_ratio
from gramgn.bench._machine import Machine
from gramgn.bench._measure import Result, Row
from gramgn.bench._problem import ALPHA, LAM, PERTURBATION
from gramgn.bench._sweep import Fit
from gramgn.bench._targets import Target

WIDTH = 100
COLUMNS = (
    "device",
    "machine",
    "shape",
    "batch",
    "num_params",
    "path",
    "variant",
    "step_s",
    "step_low_s",
    "step_high_s",
    "step_least_s",
    "step_most_s",
    "ratio",
    "ratio_low",
    "ratio_high",
    "peak_mib",
    "jacobian_mib",
    "error",
    "floor_half",
    "floor_whole",
    "note",
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool) -> str:
    """Return a table; columns after the first are aligned right, but for text.

    Args:
        head: The columns' titles.
        rows: The cells.
        markdown: With bars, to be pasted into a page.
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    if not markdown:
        shown = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([shown[0], "-" * max(map(len, shown)), *shown[1:]])
    cells = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([cells[0], "|---" + "|---:" * (len(head) - 1) + "|", *cells[1:]])


def head_text(machine: Machine, markdown: bool) -> str:
    """Return what holds for all tables: the machine and the problem."""
    problem = (
        f"Update: lam {LAM:g}, alpha {ALPHA:g} in the mean convention; x and y from N(0, 1). ResNet: last layer not "
        f"zero, every parameter moved by N(0, {PERTURBATION:g}^2). * marks the SGD that ratios refer to."
    )
    texts = (machine.text, problem)
    return "\n\n".join(texts) if markdown else "\n".join(map(_wrapped, texts))


def shape_text(result: Result, markdown: bool) -> str:
    """Return the table of one shape with its notes."""
    head = ("path", "ms/step (range)", "ratio (quartiles)", "peak MiB", "error")
    body = table(head, [_cells(row, result) for row in result.rows], markdown)
    floor = result.floor
    notes = [
        f"floor by operation counts: {floor.half:.2f} (one triangle of G) to {floor.whole:.2f}; "
        f"forward {floor.forward / 1e6:,.1f} M multiply-adds a sample"
    ]
    if result.how:
        notes.append(
            f"error: relative, of the update d, against {result.how}; up to 1e-3 where float32 turns a ReLU whose "
            "input is all but zero"
        )
    notes += [f"{row.path.label}: {_note(row)}" for row in result.rows if _note(row)]
    title = f"{result.shape.title}: m = {result.num_params:,}, J {result.jacobian_mib:,.0f} MiB"
    if markdown:
        return "\n".join([f"**{title}**", "", body, "", *(f"- {note}" for note in notes)])
    return "\n".join([title, body, *(_wrapped(note, indent="  ") for note in notes)])


def breakdown_text(result: Result, markdown: bool) -> str:
    """Return where the time of our step goes, beside the operation counts."""
    split = result.breakdown
    assert split is not None
    floor = result.floor
    counts = {
        "forward": floor.forward,
        "backward": floor.forward,
        "blocks": floor.forward - floor.factored,
        "gram": floor.gram / 2,
        "update": floor.factored + floor.update,
    }
    parts = {part: split.parts[part] for part in PARTS} | {"other": split.other_s, "step": split.step_s}
    rows = [
        (
            part,
            f"{seconds * 1e3:.2f}",
            f"{seconds / split.step_s:.1%}",
            f"{counts[part] / floor.sgd:.3f}" if part in counts else "",
        )
        for part, seconds in parts.items()
    ]
    row = result.row(result.breakdown_of)
    assert row is not None
    assert row.step_s is not None
    title = (
        f"{row.path.label}: parts of a step under the profiler (without it {row.step_s.median * 1e3:.2f} ms); "
        "count: multiply-adds over SGD's"
    )
    title = title if markdown else _wrapped(title)
    body = table(("part", "ms", "share", "count"), rows, markdown)
    return "\n".join([title, *([""] if markdown else []), body])


def kernels_text(result: Result, markdown: bool) -> str:
    """Return what the kernels of the convolutions take, and the least ratio that they allow."""
    reference = result.row(result.reference)
    assert reference is not None
    assert reference.step_s is not None
    sgd_s = reference.step_s.median
    rows = [
        (
            each.shape,
            str(each.count),
            *(f"{each.seconds[name] * 1e3:.2f}" for name in (SUMMED, each.fastest, GRAM)),
            each.fastest,
            each.chosen,
            f"{each.beyond_sgd(each.fastest) / sgd_s:.3f}",
        )
        for each in result.kernels
    ]
    title = (
        "kernels of one convolution, ms: the sum over samples that SGD takes, the fastest way to one for each "
        "sample, the Gram product of that block; beyond: over SGD's step, for all layers of the shape"
    )
    head = ("channels, kernel, plane", "layers", "summed", "each", "Gram", "by", "taken", "beyond")
    least = f"no engine of these kernels is faster than {least_ratio(result.kernels, sgd_s):.2f} times SGD"
    gap = [""] if markdown else []
    return "\n".join([title if markdown else _wrapped(title), *gap, table(head, rows, markdown), *gap, least])


def sweep_text(
    seconds: Mapping[str, Mapping[int, float]], fits: Mapping[str, Fit], title: str, markdown: bool
) -> str:
    """Return step times by batch size and path with the fitted split.

    Args:
        seconds: Median seconds of a step by path (SGD in its fastest format, ours in its) and b.
        fits: The fit of each path.
        title: The network.
        markdown: As for ``table``.
    """
    base, *others = seconds
    head = ["b"]
    for name in seconds:
        head += [f"{name} ms", "per sample"]
    head += [f"{name} / {base}" for name in others] + [f"b^2 m share of {name}" for name in others]
    rows = []
    for b in seconds[base]:
        cells = [str(b)]
        for of_b in seconds.values():
            cells += [f"{of_b[b] * 1e3:.2f}", f"{of_b[b] / b * 1e3:.3f}"]
        cells += [f"{seconds[name][b] / seconds[base][b]:.2f}" for name in others]
        cells += [f"{fits[name].square_share(b):.1%}" for name in others]
        rows.append(cells)
    lines = [
        f"{name}: t(b) = {fit.fixed_s * 1e3:.3g} ms + {fit.linear_s * 1e3:.3g} ms b + {fit.square_s:.3g} s b^2 m, "
        f"m = {fit.num_params:,}, off by at most {fit.misfit:.1%}"
        for name, fit in fits.items()
    ]
    gap = [""] if markdown else []
    return "\n".join([title, *gap, table(head, rows, markdown), *gap, *lines])


def targets_text(targets: Sequence[Target], markdown: bool) -> str:
    """Return the targets of the shapes that were measured, each met, missed or not measured."""
    rows = [(target.shape, target.text, target.measured or "-", target.verdict) for target in targets]
    return table(("targets", "to reach", "measured", ""), rows, markdown)


def csv_rows(results: Iterable[Result], machine: Machine) -> list[dict[str, Any]]:
    """Return one row for each shape and path."""
    return [_csv_row(result, row, machine) for result in results for row in result.rows]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with ``COLUMNS``; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _cells(row: Row, result: Result) -> tuple[str, ...]:
    if row.step_s is None or row.ratio is None:
        return (row.path.label, "-", "-", "-", "-")
    star = " *" if row.path.name == result.reference else ""
    return (
        row.path.label + star,
        f"{row.step_s.median * 1e3:.1f} ({row.step_s.least * 1e3:.1f}-{row.step_s.most * 1e3:.1f})",
        f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})",
        "-" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        "-" if row.error is None else f"{row.error:.1e}",
    )


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=2 * indent)


def _note(row: Row) -> str:
    said = (row.path.remark if row.step_s else "", row.variant, row.note)
    return "; ".join(text for text in said if text)


def _csv_row(result: Result, row: Row, machine: Machine) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "device": machine.device,
        "machine": machine.text,
        "shape": result.shape.text,
        "batch": result.shape.batch,
        "num_params": result.num_params,
        "path": row.path.name,
        "variant": row.variant,
        "jacobian_mib": f"{result.jacobian_mib:.1f}",
        "floor_half": f"{result.floor.half:.4f}",
        "floor_whole": f"{result.floor.whole:.4f}",
        "peak_mib": "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
        "error": "" if row.error is None else f"{row.error:.3e}",
        "note": row.note,
    }
    if row.step_s and row.ratio:
        step, ratio = row.step_s, row.ratio
        names = ("step_s", "step_low_s", "step_high_s", "step_least_s", "step_most_s")
        values = (step.median, step.low, step.high, step.least, step.most)
        cells |= {name: f"{value:.6f}" for name, value in zip(names, values, strict=True)}
        of_sgd = zip(("ratio", "ratio_low", "ratio_high"), (ratio.median, ratio.low, ratio.high), strict=True)
        cells |= {name: f"{value:.4f}" for name, value in of_sgd}
    return cells
