"""Fill the tables of docs/first_epochs.md and draw its figure from what `first_epochs.py` measured.

python scripts/first_epochs_page.py             # the page's tables; outputs/results/figures/first-epochs.png and .pdf
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from first_epochs import EPOCHS, TUNED, VARIANTS, Row, read  # noqa: E402

from gramgn.figures import Drawing, draw_first_epochs, rows_by_seed  # noqa: E402
from gramgn.records import write_atomic  # noqa: E402

PAGE = ROOT / "docs" / "first_epochs.md"
FIGURE = ROOT / "outputs" / "results" / "figures" / "first-epochs"
NAMES = {
    "rsna_synthetic": "SYNTHETIC bone age",
    "rotation": "turned radiographs, real",
    "afad_synthetic": "SYNTHETIC faces",
}


def epoch_loss(steps: Sequence[Row], epoch: int) -> float:
    """Return the training loss of an epoch as metrics.csv has it: before each step, weighted by samples."""
    own = [row for row in steps if row["epoch"] == epoch]
    return sum(row["loss"] * row["b"] for row in own) / sum(row["b"] for row in own)


def table_plain(rows: Sequence[Row]) -> str:
    """Return what some steps of the paper's rule saw and did, on synthetic bone age with the first seed."""
    steps = rows_by_seed(rows, "rsna_synthetic", "plain")[0]
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
        seeds = rows_by_seed(rows, dataset, "plain")
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
        for variant in VARIANTS:
            seeds = rows_by_seed(rows, dataset, variant)
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


def table_later(rows: Sequence[Row]) -> str:
    """Return medians over the steps of some epochs of the tuned method on turned radiographs."""
    columns = {
        "loss": "loss",
        "after": "loss_after",
        "rank": "rank",
        "mean λ": "mean_eigenvalue",
        "λ₁": "lambda_1",
        "λ₂": "lambda_2",
        "αb": "alpha_sum",
        "λ > αb": "resolved",
        "r² there": "resolved_share",
        "norm": "step_norm",
    }
    lines = [f"| epoch | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    (steps,) = rows_by_seed(rows, "rotation", TUNED)
    for epoch in (1, 2, 4, 6, 9, 12, 15, 18):
        own = [row for row in steps if row["epoch"] == epoch]
        medians = [median(row[column] for row in own) for column in columns.values()]
        lines.append(f"| {epoch} | {' | '.join(f'{value:.3g}' for value in medians)} |")
    return "\n".join(lines)


def of_variants(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the figure shows."""
    return [row for row in rows if row["variant"] in VARIANTS]


def filled(page: str, rows: Sequence[Row]) -> str:
    """Return a page with the tables between its marks."""
    tables = {"plain": table_plain, "start": table_start, "remedies": table_remedies, "later": table_later}
    for name, table in tables.items():
        text = f"<!-- table: {name} -->\n{table(rows)}\n<!-- end -->"
        page = re.sub(f"(?s)<!-- table: {name} -->.*?<!-- end -->", lambda _: text, page)  # noqa: B023
    return page


def main() -> None:
    """Write the page and the figure, as PDF and PNG."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = read()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    for extension, content in (
        Drawing(FIGURE.name, "", lambda: draw_first_epochs(of_variants(rows), NAMES, num_epochs=EPOCHS))
        .render("pdf", "png")
        .items()
    ):
        write_atomic(FIGURE.with_suffix(f".{extension}"), content)


if __name__ == "__main__":
    main()
