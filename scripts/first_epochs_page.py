"""Fill the tables of docs/first_epochs.md and draw its figure from what `first_epochs.py` measured.

python scripts/first_epochs_page.py             # the page's tables; outputs/results/figures/first-epochs.png and .pdf
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from first_epochs import EPOCHS, Row, read  # noqa: E402

from gramgn.figures import Drawing  # noqa: E402
from gramgn.records import write_atomic  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = ROOT / "docs" / "first_epochs.md"
FIGURE = ROOT / "outputs" / "results" / "figures" / "first-epochs"
NAMES = {
    "rsna_synthetic": "SYNTHETIC bone age",
    "rotation": "turned radiographs, real",
    "afad_synthetic": "SYNTHETIC faces",
}
COLORS = {
    "plain": "#D55E00",
    "last layer not zero": "#7F7F7F",
    "adaptive damping": "#CC79A7",
    "bound": "#E69F00",
    "trace": "#56B4E9",
    "trace + bound": "#0072B2",
    "trace + bound + SPRING": "#000000",
}
SMOOTHED = 8


def runs_of(rows: Sequence[Row], dataset: str, variant: str) -> list[list[Row]]:
    """Return the rows of each seed."""
    own = [row for row in rows if (row["dataset"], row["variant"]) == (dataset, variant)]
    return [[row for row in own if row["seed"] == seed] for seed in sorted({row["seed"] for row in own})]


def epoch_loss(steps: Sequence[Row], epoch: int) -> float:
    """Return the training loss of an epoch as metrics.csv has it: before each step, weighted by samples."""
    own = [row for row in steps if row["epoch"] == epoch]
    return sum(row["loss"] * row["b"] for row in own) / sum(row["b"] for row in own)


def table_plain(rows: Sequence[Row]) -> str:
    """Return what some steps of the paper's rule saw and did, on synthetic bone age with the first seed."""
    steps = runs_of(rows, "rsna_synthetic", "plain")[0]
    worst = max(steps, key=lambda row: row["loss_after"] - row["loss"])["step"]
    lines = [
        "| step | loss | after | common | predicted | moved | rank | mean λ | αb | λ > αb | r² there | norm | "
        "features |",
        "|---" * 13 + "|",
    ]
    for row in steps:
        if row["step"] in (1, 2, 3, 50, worst - 1, worst, worst + 1, len(steps) - 1):
            cells = (
                f"{row['step']}",
                *(f"{row[name]:.3g}" for name in ("loss", "loss_after")),
                f"{100 * row['common_after']:.0f} %",
                f"{row['predicted_decrease']:.3g}",
                f"{row['moved']} of {row['tensors']}",
                f"{row['rank']}",
                *(f"{row[name]:.3g}" for name in ("mean_eigenvalue", "alpha_sum")),
                f"{row['resolved']}",
                f"{100 * row['resolved_share']:.2g} %",
                *(f"{row[name]:.2g}" for name in ("step_norm", "features")),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_start(rows: Sequence[Row]) -> str:
    """Return what is alike on all data sets in the first three epochs of the paper's rule."""
    lines = [
        "| epochs 1 to 3 of the paper's rule | α | αb / mean λ | λ > αb | r² there | loss, epoch 3 |",
        "|---" * 6 + "|",
    ]
    for dataset, name in NAMES.items():
        seeds = runs_of(rows, dataset, "plain")
        if not seeds:
            continue
        steps = [row for steps in seeds for row in steps if row["epoch"] <= 3]
        relative = median(row["alpha_sum"] / row["mean_eigenvalue"] for row in steps)
        share = median(row["resolved_share"] for row in steps)
        lines.append(
            f"| {name} | {steps[0]['alpha_sum'] / steps[0]['b']:.2g} | {relative:.2g} | "
            f"{median(row['resolved'] for row in steps):g} of {steps[0]['b']} | {100 * share:.2g} % | "
            f"{median(epoch_loss(steps, 3) for steps in seeds):.3f} |"
        )
    return "\n".join(lines)


def table_remedies(rows: Sequence[Row]) -> str:
    """Return the losses of the first four epochs of every variant."""
    epochs = " | ".join(f"epoch {epoch}" for epoch in range(1, EPOCHS + 1))
    lines = [
        f"| data | rule | seeds | {epochs} | range | largest loss | raise it | λ > αb | step norm | features |",
        "|---" * (9 + EPOCHS) + "|",
    ]
    for dataset, name in NAMES.items():
        for variant in COLORS:
            seeds = runs_of(rows, dataset, variant)
            if not seeds:
                continue
            steps = [row for steps in seeds for row in steps if row["epoch"] <= EPOCHS]
            raised = fmean(row["loss_after"] > row["loss"] for row in steps)
            losses = [[epoch_loss(steps, epoch) for steps in seeds] for epoch in range(1, EPOCHS + 1)]
            cells = (
                name,
                variant,
                f"{len(seeds)}",
                *(f"{median(each):.2f}" for each in losses),
                f"{min(losses[-1]):.2f} to {max(losses[-1]):.2f}",
                f"{max(row['loss'] for row in steps):.1f}",
                f"{100 * raised:.0f} %",
                f"{median(row['resolved'] for row in steps):g}",
                f"{median(row['step_norm'] for row in steps):.2g}",
                f"{min(row['features'] for row in steps):.2g}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str, rows: Sequence[Row]) -> str:
    """Return a page with the tables between its marks."""
    for name, table in (("plain", table_plain), ("start", table_start), ("remedies", table_remedies)):
        text = f"<!-- table: {name} -->\n{table(rows)}\n<!-- end -->"
        page = re.sub(f"(?s)<!-- table: {name} -->.*?<!-- end -->", lambda _: text, page)  # noqa: B023
    return page


def smoothed(values: Sequence[float]) -> list[float]:
    """Return geometric means over the last `SMOOTHED` values (fewer at the start): overshoot and decay count alike."""
    logs = [math.log(value) for value in values]
    return [math.exp(fmean(logs[max(0, end - SMOOTHED) : end])) for end in range(1, len(logs) + 1)]


def draw(rows: Sequence[Row]) -> Figure:
    """Draw the diagnosis of the paper's rule on the left, and losses with the remedies on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 6.4))
    panels = figure.subplots(3, 2)
    figure.suptitle(
        "The first epochs of ResNetFixup from a zero last layer; lines: medians, bands: range over seeds",
        fontsize=8,
    )
    _draw_diagnosis(panels[:, 0], rows)
    for axes, (dataset, name) in zip(panels[:, 1], NAMES.items(), strict=True):
        axes.axhline(1, color="#999999", linewidth=0.7, linestyle=(0, (2, 2)))
        for variant, color in COLORS.items():
            band(axes, rows, dataset, variant, "loss", color, variant, last=EPOCHS)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high > 2.5 * low else (1, 1.1, 1.2, 8, 9)
        _finish(axes, f"{name}: training loss, mean of {SMOOTHED} steps", steps)
    panels[0, 1].legend(fontsize=6, ncols=2, loc="lower left")
    for axes in panels[2]:
        axes.set_xlabel("step")
    return figure


def _draw_diagnosis(panels: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Draw loss, scale of G and what G resolves, for the paper's rule on synthetic bone age."""
    case = (rows, "rsna_synthetic", "plain")
    loss, scale, share = panels
    band(loss, *case, "loss", COLORS["plain"], "loss before the step", smooth=False)
    raised = [row["step"] for row in runs_of(*case)[0] if row["loss_after"] > row["loss"]]
    ticks = loss.get_xaxis_transform()
    loss.plot(
        raised, [0.03] * len(raised), "|", color="#000000", transform=ticks, label="seed 0: step raises it"
    )
    loss.set_yscale("log")
    _finish(loss, "plain, SYNTHETIC bone age: stands still, then overshoots", (1, 3))
    for column, shade, label in (
        ("lambda_1", "#0072B2", "largest eigenvalue of G"),
        ("mean_eigenvalue", "#56B4E9", "mean eigenvalue of G"),
        ("alpha_sum", "#000000", "damping αb"),
    ):
        band(scale, *case, column, shade, label, smooth=False)
    scale.set_yscale("log")
    _finish(scale, "plain: G is of the size of αb at first, far above it afterwards", (1,))
    band(share, *case, "resolved_share", "#009E73", "share of |r|² with λ > αb", smooth=False)
    share.set_ylim(0, 1.05)
    _finish(share, "plain: the step resolves next to nothing, then nearly all", None)
    for axes in panels:
        axes.legend(fontsize=6, loc="upper left")


def _finish(axes: Axes, title: str, steps: tuple[float, ...] | None) -> None:
    """Set title and ticks; `steps`: the labelled multiples of powers of ten on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(title, fontsize=7.5, loc="left")
    axes.set_xlim(left=1)
    if steps is not None:
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def band(
    axes: Axes,
    rows: Sequence[Row],
    dataset: str,
    variant: str,
    column: str,
    color: str,
    label: str,
    *,
    smooth: bool = True,
    last: int | None = None,
) -> None:
    """Draw the median over seeds of a column against the steps of whole batches, and its range."""
    seeds = [
        [row for row in steps if row["b"] == steps[0]["b"] and (last is None or row["epoch"] <= last)]
        for steps in runs_of(rows, dataset, variant)
    ]
    if not seeds:
        return
    curves = [[row[column] for row in steps] for steps in seeds]
    values = list(zip(*(map(smoothed, curves) if smooth else curves), strict=True))
    x = [row["step"] for row in seeds[0]]
    axes.plot(x, [median(each) for each in values], color=color, linewidth=1.1, label=label)
    axes.fill_between(
        x,
        [min(each) for each in values],
        [max(each) for each in values],
        color=color,
        alpha=0.15,
        linewidth=0,
    )


def main() -> None:
    """Write the page and the figure, as PDF and PNG."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = read()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    for extension, content in Drawing(FIGURE.name, "", lambda: draw(rows)).render("pdf", "png").items():
        write_atomic(FIGURE.with_suffix(f".{extension}"), content)


if __name__ == "__main__":
    main()
