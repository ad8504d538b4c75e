"""From run folders or results files to one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gramgn.errors import InputError, counted
from gramgn.figures import (
    PANELS,
    THEORY,
    Drawing,
    FigureSet,
    Shown,
    claims,
    drawings,
    figure_sets,
    read_table,
    theory_claims,
    theory_title,
)
from gramgn.progress import say
from gramgn.records import write_atomic
from gramgn.report.details import compared_settings, sections
from gramgn.report.run_table import COLUMNS, NOTHING, NUM_PRINTED, ReportRun, number_text, run_values


def make_report(*sources: str | os.PathLike[str], out: Path, report: Callable[[str], None] = say) -> Path:
    """Write one HTML page about all runs, whatever their state. The same runs give the same bytes.

    Args:
        *sources: Folders to search for runs, to any depth, and CSVs of results or of the theory. A results CSV holds
            only part of a run's settings.
        out: The HTML file; its folder is made if missing.
        report: Called with one line on what was found.

    Returns:
        The HTML file.

    Raises:
        InputError: There is no run at all, an input is damaged, or the file cannot be written.
    """
    paths = [Path(source) for source in sources]
    left_out: list[str] = []
    table, shown = read_table(*paths, report=left_out.append)
    table = table.drop_duplicates(["run", "began", "epoch"], keep="last")
    found = [ReportRun(rows) for _, rows in table.groupby("run")]
    if not found and not shown and not left_out:
        places = ", ".join(str(path.absolute()) for path in paths)
        raise InputError(
            f"no run in {places}. Make some with `make demo` (a few minutes), or one with "
            "`python train.py trainer=laptop`."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {out.parent.absolute()}: {error.strerror or error}"
        ) from error
    sets, _ = figure_sets(shown.rows)
    compared = compared_settings(found)
    text = _template().render(
        # Our own files: the only two texts that are not escaped.
        style=Markup(_own_file("style.css")),
        script=Markup(_own_file("script.js")),
        source=", ".join(path.name for path in paths),
        runs=found,
        overview=_overview(table),
        synthetic=sorted(set(table.dataset[table.kind == "synthetic"].dropna())),
        code=sorted(set(table.code.dropna())),
        claims=_claims(sets, shown),
        pictures=_pictures(sets, shown, left_out),
        problems=[run for run in found if run.reason],
        left_out=[_relative(line, paths) for line in left_out],
        columns=COLUMNS,
        num_printed=NUM_PRINTED,
        rows=list(zip(found, run_values(table).itertuples(index=False), strict=True)),
        usual=_usual(compared),
        unusual=dict(list(compared[compared.value != compared.usual].groupby("run"))),
        sections=sections,
        number=number_text,
        nothing=NOTHING,
    )
    # A folder's name need not be text.
    write_atomic(out, text.encode("utf-8", errors="replace"))
    num_unfinished = sum(run.reason is not None for run in found)
    ended = f"{num_unfinished} did not finish" if num_unfinished else "all finished"
    report(f"{counted(len(found), 'run')}, {ended}")
    return out


def _usual(compared: pd.DataFrame) -> list[tuple[str, int, dict[str, str]]]:
    """Return choices, the number of runs with each, and the usual values by key; what all runs have comes first."""
    found = [
        (str(choice), own.run.nunique(), dict(zip(own.key, own.usual, strict=True)))
        for choice, own in compared.groupby("choice")
    ]
    return sorted(found, key=lambda usual: usual[0] != "general")


def _overview(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what was run: one line per data set, scale and device."""
    names = ["kind", "dataset", "scale", "device"]
    heads = table.drop_duplicates("run").fillna(dict.fromkeys(names, "unknown"))
    found = []
    for key, group in heads.groupby(names):
        line = dict(zip(names, key, strict=True))
        for name in ("image_size", "num_images", "threads"):
            line[name] = ", ".join(map(str, sorted(group[name].dropna().unique()))) or "unknown"
        states = group.state.value_counts().sort_index()
        found.append(
            {**line, "runs": len(group), "states": ", ".join(f"{n} {state}" for state, n in states.items())}
        )
    return found


def _claims(sets: list[FigureSet], shown: Shown) -> list[dict[str, Any]]:
    found = [{"title": figures.title, "claims": claims(figures)} for figures in sets]
    if shown.theory:
        found.append({"title": theory_title(shown.theory), "claims": theory_claims(shown.theory)})
    return found


def _pictures(sets: list[FigureSet], shown: Shown, left_out: list[str]) -> list[dict[str, Any]]:
    """Return the figures in groups: those of the paper set by set, the theory's, the comparisons of other runs."""
    groups = {figures.name: {"title": figures.title, "missing": _missing(figures)} for figures in sets}
    groups |= {THEORY: {"title": "The theory"}, "": {"title": "Comparisons of other runs"}}
    by_name = {figures.name: figures for figures in sets}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in groups}
    for drawing in drawings(shown, report=left_out.append):
        content = drawing.render("png").get("png")
        if content is None:
            continue
        # The first chunk of every PNG states its size: with it, the page does not jump while it loads.
        width, height = struct.unpack(">II", content[16:24])
        set_name = drawing.figure_set
        axis = ""
        if drawing.panel is not None and drawing.grid is None:
            axis = ", against training time" if drawing.panel.against_time else ", against epochs"
        found[set_name].append(
            {
                "name": drawing.stem,
                "title": drawing.title + axis,
                "alt": _alt_text(drawing, by_name.get(set_name), axis),
                "source": "data:image/png;base64," + base64.b64encode(content).decode(),
                "width": width,
                "height": height,
                "is_whole": set_name == THEORY or drawing.stem.startswith("paper-"),
            }
        )
    return [
        {"missing": [], **group, "pictures": found[name]} for name, group in groups.items() if found[name]
    ]


def _alt_text(drawing: Drawing, figures: FigureSet | None, axis: str) -> str:
    """Return what a figure shows in words, for readers who cannot see it."""
    if drawing.grid is not None:
        grid = drawing.grid
        losses = {pair: cell.loss for pair, cell in grid.cells.items() if cell.loss is not None}
        text = (
            f"Heat map of the training loss at epoch {grid.epoch}, lighter is higher: lambda from {grid.lams[0]:g} to "
            f"{grid.lams[-1]:g}, alpha from {grid.alphas[0]:g} to {grid.alphas[-1]:g} ({grid.convention} convention)."
        )
        if losses:
            lam, alpha = min(losses, key=lambda pair: losses[pair])
            text += (
                f" The least loss is {number_text(losses[lam, alpha])} at lambda {lam:g}, alpha {alpha:g}."
            )
        return text
    if drawing.panel is not None and figures is not None:
        column, ends = drawing.panel.column, []
        for curve in figures.curves[drawing.panel.family].curves:
            last = curve.points(column)["median"].tail(1)
            ends += [f"{curve.legend} ends at {number_text(value)}" for value in last]
        name = "test loss" if column == "test_loss" else "training loss"
        return f"Lines of the {name}{axis.strip(',')}, logarithmic: {'; '.join(ends)}."
    if figures is not None:
        return "The figures above, together on one page."
    return (
        drawing.alt
        or f"{drawing.title}: lines against training time on the left, against epochs on the right."
    )


def _missing(figures: FigureSet) -> list[str]:
    """Return how the panels without a run are made."""
    commands: dict[str, dict[str, None]] = {}
    for panel in PANELS:
        if panel not in figures.panels:
            commands.setdefault(panel.command, {})[panel.number] = None
    return [
        f"Figure {', '.join(numbers)}: no finished run; {command} makes one"
        for command, numbers in commands.items()
    ]


def _relative(line: str, paths: list[Path]) -> str:
    """Return a message with relative paths: the page may be passed on."""
    for path in paths:
        line = line.replace(f"{path.absolute()}/", "")
    return line


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("gramgn.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def _own_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
