"""Tables for a terminal, and the CSV file."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.breakdown import PARTS, Breakdown
from benchmarks.convolutions import GRAM, SUMMED, least_ratio
from benchmarks.fit import fit_cost
from benchmarks.measure import Result, Row
from benchmarks.paths import OURS
from benchmarks.problem import ALPHA, LAM, PERTURBATION
from benchmarks.targets import TARGETS, memory_in_jacobians, met, shortfalls

WIDTH = 100
COLUMNS = (
    "device",
    "machine",
    "shape",
    "batch",
    "num_params",
    "path",
    "variant",
    "kernels",
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


BELOW_ONE = (
    "A ratio below 1 is no free second order: SGD's weight gradients, summed over the batch, are the library's, below "
    "the processor's peak and without Winograd's algorithm. The same kernel would speed SGD up too."
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of titles and cells whose columns after the first are aligned right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([shown[0], "-" * max(map(len, shown)), *shown[1:]])


def head_text(machine: str) -> str:
    """Return the head of all tables: the machine and the problem."""
    problem = (
        f"Update: lam {LAM:g}, alpha {ALPHA:g} in the mean convention; x and y from N(0, 1). Fixup: last layer not "
        f"zero, every parameter moved by N(0, {PERTURBATION:g}^2). SGD is the fastest of its memory formats and "
        "updates (one parameter at a time, foreach, fused)."
    )
    return "\n".join((_wrapped(machine), _wrapped(problem)))


def result_text(result: Result) -> str:
    """Return all tables of one shape."""
    tables = [shape_text(result)]
    tables += [breakdown_text(result, *each) for each in result.breakdowns.items()]
    if result.convolutions:
        tables.append(convolutions_text(result))
    return "\n\n".join(tables)


def shape_text(result: Result) -> str:
    """Return the table of one shape with its notes."""
    head = ("path", "kernels", "ms/step (range)", "ratio (quartiles)", "peak MiB", "error")
    body = table(head, [_cells(row) for row in result.rows])
    counts = result.counts
    notes = [
        f"least ratio by operation counts: {counts.half:.2f} (one triangle of G) to {counts.whole:.2f}; "
        f"forward {counts.forward / 1e6:,.1f} M multiply-adds per sample"
    ]
    if any(row and row.ratio and row.ratio.median < 1 for row in map(result.row, OURS)):
        notes.append(BELOW_ONE)
    if result.how:
        notes.append(
            f"error: of the update d, relative to {result.how}; up to 1e-3 if float32 switches a ReLU whose input is "
            "almost zero"
        )
    notes += [f"{row.path.label}: {_note(row)}" for row in result.rows if _note(row)]
    title = f"{result.shape.title}: m = {result.num_params:,}, J {result.jacobian_mib:,.0f} MiB"
    return "\n".join([title, body, *(_wrapped(note, indent="  ") for note in notes)])


def breakdown_text(result: Result, path: str, split: Breakdown) -> str:
    """Return the time of each part of our step, with the operation counts."""
    counted = result.counts
    counts = {
        "forward": counted.forward,
        "backward": counted.forward,
        "blocks": counted.forward - counted.factored,
        "gram": counted.gram / 2,
        "update": counted.factored + counted.update,
    }
    parts = {part: split.parts[part] for part in PARTS} | {"other": split.other_s, "step": split.step_s}
    rows = [
        (
            part,
            f"{seconds * 1e3:.2f}",
            f"{seconds / split.step_s:.1%}",
            f"{counts[part] / counted.sgd:.3f}" if part in counts else "",
        )
        for part, seconds in parts.items()
    ]
    row = result.row(path)
    assert row is not None
    assert row.step_s is not None
    title = (
        f"{row.path.label}: parts of a step under the profiler (without it {row.step_s.median * 1e3:.2f} ms); "
        "count: multiply-adds relative to SGD's"
    )
    body = table(("part", "ms", "share", "count"), rows)
    return "\n".join([_wrapped(title), body])


def convolutions_text(result: Result) -> str:
    """Return the times of the convolutions' products and the least ratio that they allow."""
    reference = result.row("sgd")
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
        for each in result.convolutions
    ]
    title = (
        "one convolution, ms: the weight gradient summed over samples, as for SGD; the fastest way to one "
        "per sample; the Gram product of that block; beyond: relative to SGD's step, for all layers of the shape"
    )
    head = ("channels, kernel, plane", "layers", "summed", "each", "Gram", "by", "taken", "beyond")
    least = (
        f"no engine without compiled kernels beats {least_ratio(result.convolutions, sgd_s):.2f} times SGD"
    )
    return "\n".join([_wrapped(title), table(head, rows), least])


def sweep_text(results: Sequence[Result]) -> str:
    """Return step times by batch size, of SGD and ours in their fastest forms at each, with the fits."""
    seconds: dict[str, dict[int, float]] = {"SGD": {}, "ours": {}}
    for result in results:
        for name, row in (("SGD", result.row("sgd")), ("ours", result.row("ours"))):
            if row and row.step_s:
                seconds[name][result.shape.batch] = row.step_s.median
    sgd, ours = seconds.values()
    fits = {name: fit_cost(of_b, results[0].num_params) for name, of_b in seconds.items()}
    head = ("b", "SGD ms", "per sample", "ours ms", "per sample", "ours / SGD", "b^2 m share of ours")
    rows = []
    for b in sgd:
        times = [
            text for of_b in (sgd, ours) for text in (f"{of_b[b] * 1e3:.2f}", f"{of_b[b] / b * 1e3:.3f}")
        ]
        rows.append([str(b), *times, f"{ours[b] / sgd[b]:.2f}", f"{fits['ours'].square_share(b):.1%}"])
    lines = [
        f"{name}: t(b) = {fit.fixed_s * 1e3:.3g} ms + {fit.linear_s * 1e3:.3g} ms b + {fit.square_s:.3g} s b^2 m, "
        f"m = {fit.num_params:,}, off by at most {fit.misfit:.1%}"
        for name, fit in fits.items()
    ]
    title = results[0].shape.title.replace(f", batch {results[0].shape.batch}", "")
    return "\n".join([title, table(head, rows), *lines])


def summary_text(results: Sequence[Result], processor: str) -> str:
    """Return our ratios at all shapes next to their targets, the operation counts and the fastest other way."""
    head = ("shape", "kernels", "ratio", "target", "count", "memory, J", "fastest other")
    rows = []
    for result in results:
        target = TARGETS.get(result.shape.text)
        others = [(row.ratio.median, row.path.label) for row in result.rows if row.path.apart and row.ratio]
        fastest = "{:.2f} {}".format(*min(others)) if others else "-"
        for row in map(result.row, OURS):
            if row is None or row.ratio is None:
                continue
            ratio, memory = row.ratio.median, memory_in_jacobians(result, row)
            goal = target.of(row, processor) if target else None
            rows.append(
                (
                    result.shape.text,
                    row.kernels or "none",
                    f"{ratio:.2f}",
                    f"{goal:.2f} {'met' if met(ratio, goal) else 'missed'}" if goal else "-",
                    f"{result.counts.half:.2f}",
                    "-" if memory is None else f"{memory:.2f}",
                    fastest,
                )
            )
    lines = shortfalls(results, processor)
    return "\n".join(["Ratios to SGD and their targets", table(head, rows), *map(_wrapped, lines)])


def write_csv(path: Path, results: Iterable[Result], device: str, machine: str) -> None:
    """Write a CSV file with one row per shape and path; the folder is created if needed."""
    of_machine = {"device": device, "machine": machine}
    rows = [of_machine | _csv_row(result, row) for result in results for row in result.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _cells(row: Row) -> tuple[str, ...]:
    if row.step_s is None or row.ratio is None:
        return (row.path.label, "", "-", "-", "-", "-")
    return (
        row.path.label,
        row.kernels,
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


def _csv_row(result: Result, row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "shape": result.shape.text,
        "batch": result.shape.batch,
        "num_params": result.num_params,
        "path": row.path.name,
        "variant": row.variant,
        "kernels": row.kernels,
        "jacobian_mib": f"{result.jacobian_mib:.1f}",
        "floor_half": f"{result.counts.half:.4f}",
        "floor_whole": f"{result.counts.whole:.4f}",
        "peak_mib": "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
        "error": "" if row.error is None else f"{row.error:.3e}",
        "note": row.note,
    }
    if row.step_s and row.ratio:
        step, ratio = row.step_s, row.ratio
        cells |= {"step_s": f"{step.median:.6f}", "ratio": f"{ratio.median:.4f}"}
        cells |= {f"step_{name}_s": f"{getattr(step, name):.6f}" for name in ("low", "high", "least", "most")}
        cells |= {f"ratio_{name}": f"{getattr(ratio, name):.4f}" for name in ("low", "high")}
    return cells
