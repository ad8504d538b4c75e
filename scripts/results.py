"""Write the tables and figures of docs/results.md and README.md from outputs/results/evidence_*.csv.

python scripts/results.py

Only what stands between the markers of a section is rewritten; a section whose runs are not there yet says so, or in
the README stays as it is. Exit codes: 0 written, 2 a damaged file.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import evidence  # noqa: E402

from gramgn.errors import InputError, counted  # noqa: E402
from gramgn.figures import (  # noqa: E402
    Drawing,
    FigureSet,
    Grid,
    claims,
    draw_budgets,
    draw_grid,
    draw_lengths,
    draw_study,
    make_grid,
)
from gramgn.records import at_end, baselines, runs, with_seconds, write_atomic  # noqa: E402
from gramgn.report import tables  # noqa: E402

if TYPE_CHECKING:
    import pandas as pd

PAGES = ("docs/results.md", "README.md")
OURS = evidence.OURS_AND_RECIPE
NAMES = {
    "rotation": "Turned radiographs",
    "retinamnist": "RetinaMNIST",
    "rsna_synthetic": "SYNTHETIC bone age",
    "afad_synthetic": "SYNTHETIC faces",
}
VARIED = ("sensitivity", "rsna_synthetic")
"""The block and the data set of the sensitivity studies."""
STUDIES = {
    "grid-plain": "λ and α of the paper's GGN on ResNetFixup",
    "grid-recipe": "λ and α of the recommended recipe",
    "batch": "Batch size of the recipe, α in both conventions",
    "labels": "Targets standardised or not",
    "last-layer": "Last layer zero or random at the start",
    "seeds": "Ten seeds",
}
README_CAPTION = """
*Runs of 18 epochs with tuned baselines, GGN with SPRING momentum, tuned like them, and the recommended recipe; medians
and ranges over seeds. In the first epochs the test loss of GGN is the lowest; but the strongest baseline, with a
schedule stretched over a third of the epochs, ends there with a lower validation loss, see [Results](#results). Two of
the data sets are SYNTHETIC.*
"""
README_WORDS = """Relative to the strongest tuned baseline of each data set: validation loss with a third of its
epochs, with half of its seconds, and test error at the end. *Ahead* and *behind* mean that all seeds agree, at the end
also that the difference is at least 5 %. A ratio below 1 favours GGN. The recipe was chosen on SYNTHETIC bone age at
laptop size. [Results](docs/results.md) has every number, its spread, and the claims of the paper.

"""
MARKED = r"(<!-- begin {0}: [^\n]*-->\n).*?(<!-- end {0} -->)"


class Evidence:
    """What the committed files hold.

    Attributes:
        tables: Rows of `runs` by block, with the seconds of the block clock.
        whole: Rows by block and data set, where all planned runs are there.
        missing: Sentences about what is not there.
    """

    def __init__(self) -> None:
        paths = {block: evidence.RESULTS / f"evidence_{block}.csv" for block in evidence.BLOCKS}
        self.tables = {block: runs(path) for block, path in paths.items() if path.is_file()}
        clock = self.tables.get("clock", runs())
        self.whole: dict[tuple[str, str], pd.DataFrame] = {}
        self.missing: list[str] = []
        for block, (datasets, _, count) in evidence.BLOCKS.items():
            for dataset in datasets if count else ():
                table = self.tables.get(block)
                rows = runs() if table is None else planned_rows(table, block, dataset)
                if (found := rows["run"].nunique()) == count:
                    self.whole[block, dataset] = with_seconds(rows, clock)
                elif table is None:
                    self.missing = [*dict.fromkeys([*self.missing, f"`{block}`"])]
                else:
                    self.missing.append(f"`{block}` on `{dataset}` ({found} of {count} runs)")

    def of(self, *blocks: str) -> dict[tuple[str, str], pd.DataFrame]:
        """Return the rows of some blocks by the names of data set and size."""
        return {
            (NAMES[dataset], evidence.BLOCKS[block][1]): rows
            for (block, dataset), rows in self.whole.items()
            if block in blocks
        }


def planned_rows(table: pd.DataFrame, block: str, dataset: str) -> pd.DataFrame:
    """Return the rows of a block that are in the plan, which may have changed since some were run."""
    try:
        keys = {evidence.key(words) for words in evidence.planned(block, dataset)}
    except InputError:  # the plan follows from blocks that are not complete
        keys = set()
    return table[(table["dataset"] == dataset) & table["run"].map(evidence.digits).isin(keys)]


def sections(found: Evidence) -> dict[str, str]:
    """Return the text of every section of the pages, without those of the README whose runs are not there yet."""
    compared = found.of("final", "desk")
    ends = {place: at_end(rows) for place, rows in compared.items()}
    summary = tables.summary_table(ends, OURS) if ends else ""
    texts = {
        "status": status(found),
        "summary": summary + pictures("budgets", "Validation loss at the end of a budget", ends),
        "details": pictures("lengths", "Training and test loss against epoch", ends)
        + "".join(f"\n{details(*place, own)}" for place, own in ends.items()),
        "cost": cost(found),
        "trials": "\n".join(trials(dataset) for block, dataset in found.whole if block == "refine"),
        "claims": claims_section(found.of("paper", "desk_paper")),
        "sensitivity": sensitivity(found),
    }
    texts = {name: text or "The runs of this section are not there yet.\n" for name, text in texts.items()}
    laptop = [place for place in ends if place[1] == "laptop"]
    if len(laptop) == len(evidence.BLOCKS["final"][0]):
        picture = pictures("lengths", "Training and test loss against epoch", laptop)
        texts["readme-picture"] = picture.replace("../", "") + README_CAPTION
        texts["readme-results"] = README_WORDS + summary
    return texts


def pictures(kind: str, alt: str, places: Iterable[tuple[str, str]]) -> str:
    """Return a picture per size."""
    sizes = dict.fromkeys(size for _, size in places)
    return "".join(image(f"evidence-{kind}-{size}", f"{alt}, {size} size") for size in sizes)


def image(stem: str, alt: str) -> str:
    """Return a picture of the results folder for a page in docs."""
    return f"\n![{alt}](../outputs/results/figures/{stem}.png)\n"


def status(found: Evidence) -> str:
    """Return which runs there are, from which code and machine, and which are missing."""
    rows = []
    for block, table in found.tables.items():
        own = [
            ", ".join(sorted(table[column].dropna().unique()))
            for column in ("code", "device", "kernels", "torch")
        ]
        rows.append([f"`{block}`", str(table["run"].nunique()), *own])
    text = tables.markdown(("block", "runs", "versions of the code", "processor", "kernels", "torch"), rows)
    missing = (
        f"\nNot complete, or chosen by blocks that are not, and left out below: {'; '.join(found.missing)}.\n"
        if found.missing
        else ""
    )
    clock, timed = "", evidence.BLOCKS["clock"][0]
    if "clock" not in found.tables:
        clock = "\nNo seconds are measured yet: the block `clock` is missing.\n"
    elif all(("refine", dataset) in found.whole for dataset in timed) and (
        lacking := sum(len(evidence.missing("clock", dataset)) for dataset in timed)
    ):
        clock = f"\nSeconds are not final: {counted(lacking, 'run')} of the block `clock` are missing.\n"
    return (text if rows else "") + missing + clock


def details(dataset: str, size: str, ends: pd.DataFrame) -> str:
    """Return what is reported for a data set at one size."""
    return "\n".join(
        (
            f"### {dataset}, {size} size\n",
            tables.budget_table(ends, OURS),
            "Time to target; in brackets, the ratio to the strongest baseline's own:\n",
            tables.target_table(ends, OURS),
            "Paired differences to the strongest baseline:\n",
            tables.verdict_table(ends, OURS),
        )
    )


def cost(found: Evidence) -> str:
    """Return what an epoch of ours costs next to the strongest baseline, and one of the paper's GGN next to SGD."""
    pairs = []
    for place, rows in found.of("final", "desk").items():
        method = rows["optimizer"] + " on " + rows["model"]
        strongest, budget = baselines(at_end(rows), ours=OURS)[0]
        other = rows[(method == strongest) & (rows["epochs"] == budget)]
        longest = [rows[(method == each) & (rows["epochs"] == rows["epochs"].max())] for each in OURS]
        pairs += [(*place, own, other) for own in longest if len(own)]
    for place, rows in found.of("paper", "desk_paper").items():
        on_fixup = rows[rows["model"] == "resnet_fixup"]
        own = on_fixup[on_fixup["damping_convention"] == "mean"]
        pairs.append((*place, own, on_fixup[on_fixup["optimizer"] == "sgd"]))
    return tables.cost_table(pairs) if pairs and "clock" in found.tables else ""


def trials(dataset: str) -> str:
    """Return the trial of each method that was chosen on a data set for each budget."""
    lengths = evidence.BUDGETS["laptop"]
    rows = []
    for method in evidence.METHODS:
        best = [evidence.ranked(dataset, method, epochs)[0] for epochs in lengths]
        settings = [
            " ".join(re.sub(r"(schedule|optimizer|trainer)[.=]", "", words).split()[2:]) for _, words in best
        ]
        cells = [f"`{words}`: {tables.number(loss)}" for (loss, _), words in zip(best, settings, strict=True)]
        rows.append([method.replace("-", " on "), *cells])
    header = ("method", *(f"{epochs} epochs: setting, validation loss" for epochs in lengths))
    return f"{NAMES[dataset]}:\n\n" + tables.markdown(header, rows)


def claims_section(places: dict[tuple[str, str], pd.DataFrame]) -> str:
    """Return what the paper claims of GGN, measured on its curves."""
    rows = []
    for (dataset, size), table in places.items():
        method = table["optimizer"] + " " + table["model"]
        sgd = [table[method == f"sgd {model}"] for model in ("resnet_bn", "resnet_fixup")]
        ggn = table[method == "ggn resnet_fixup"]
        for convention, own in ggn.groupby("damping_convention"):
            rows.append([dataset, size, f"next to the {convention}", *tables.claims_row(own, sgd)])
    header = ("training loss within 0.05", "ahead per epoch", "ahead per second", "test loss falls faster")
    return tables.markdown(("data set", "size", "α", *header, "test loss ends lower"), rows) if rows else ""


def study_lines(rows: pd.DataFrame) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the rows of the block sensitivity, or its runs at their ends, by study and line."""
    key_of, epochs = rows["run"].map(evidence.digits), evidence.BUDGETS["laptop"][0]

    def of(jobs: list[tuple[str, int]]) -> pd.DataFrame:
        keys = [evidence.key(evidence.job(VARIED[1], "laptop", words, epochs, seed)) for words, seed in jobs]
        return rows[key_of.isin(keys)]

    return {
        study: {line: of(jobs) for line, jobs in lines.items()} for study, lines in evidence.studies().items()
    }


def sensitivity(found: Evidence) -> str:
    """Return the claims about lambda and alpha, the losses of the other studies, and the figures."""
    if VARIED not in found.whole:
        return ""
    table = found.whole[VARIED]
    text, rows = "", []
    for study, lines in study_lines(table).items():
        if "" in lines:
            grid = FigureSet(study, "synthetic", "laptop", "", grid=grid_of(study, lines[""]))
            for claim in claims(grid):
                if claim.key in ("lambda_near_1", "alpha_hardly_matters"):
                    first = claim.measurements[0]
                    text += f"- {STUDIES[study]}: {claim.text}: **{claim.verdict}**; {first.name}: {first.text}.\n"
    for study, lines in study_lines(at_end(table)).items():
        for line, ends in lines.items() if "" not in lines else ():
            for size, own in ends.groupby("batch_size"):
                cells = [tables.spread(own[column]) for column in ("train_loss", "val_loss", "val_mae")]
                rows.append([STUDIES[study], line, str(size), str(len(own)), *cells])
    header = (
        "varied",
        "line",
        "batch",
        "seeds",
        "training loss",
        "validation loss",
        "validation error, months",
    )
    figures = "".join(image(f"evidence-{study}", name) for study, name in STUDIES.items())
    return f"{text}\n{tables.markdown(header, rows)}{figures}"


def grid_of(study: str, rows: pd.DataFrame) -> Grid:
    """Return a grid over lambda and alpha with its title."""
    return make_grid(rows, f"{STUDIES[study]}\nSYNTHETIC bone age, laptop size")


def drawings(found: Evidence) -> list[Drawing]:
    """Return the figures of all sections whose runs are there."""
    drawn = []
    for size in ("laptop", "desk"):
        sets = {dataset: rows for (dataset, of), rows in found.of("final", "desk").items() if of == size}
        if sets:
            drawn.append(Drawing(f"evidence-budgets-{size}", "", partial(draw_budgets, sets, OURS)))
            drawn.append(Drawing(f"evidence-lengths-{size}", "", partial(draw_lengths, sets, OURS)))
    for study, lines in study_lines(found.whole[VARIED]).items() if VARIED in found.whole else ():
        draw = partial(draw_study, lines, f"{STUDIES[study]}\nSYNTHETIC bone age, laptop size")
        if "" in lines:
            draw = partial(draw_grid, grid_of(study, lines[""]))
        elif study == "batch":
            draw = partial(draw, column="val_loss", x="batch_size")
        else:
            draw = partial(draw, column="val_mae" if study == "labels" else "train_loss")
        drawn.append(Drawing(f"evidence-{study}", "", draw))
    return drawn


def filled(page: str, texts: Mapping[str, str]) -> str:
    """Return a page with its generated sections replaced."""
    for name, text in texts.items():
        page = re.sub(MARKED.format(name), rf"\g<1>\n{text}\n\g<2>", page, flags=re.DOTALL)
    return page


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, which has no options, and return the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    try:
        found = Evidence()
        for drawing in drawings(found):
            for extension, content in drawing.render("pdf", "png").items():
                write_atomic(evidence.RESULTS / "figures" / f"{drawing.stem}.{extension}", content)
        texts = sections(found)
        for name in PAGES:
            page = (ROOT / name).read_text(encoding="utf-8")
            write_atomic(ROOT / name, filled(page, texts))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(found.missing))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
