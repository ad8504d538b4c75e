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

from gramgn.errors import InputError
from gramgn.figures import (
    PANELS,
    THEORY,
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
from gramgn.report.alt import alt_text
from gramgn.report.details import UsualSettings, sections
from gramgn.report.run_table import NOTHING, ReportRun, columns, number_text


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
    usual = UsualSettings(found)
    shown_columns = columns()
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
        columns=shown_columns,
        rows=[(run, [column.value(run) for column in shown_columns]) for run in found],
        usual=usual,
        sections=sections,
        number=number_text,
        nothing=NOTHING,
    )
    # A folder's name need not be text.
    write_atomic(out, text.encode("utf-8", errors="replace"))
    report(f"{len(found)} runs, {sum(run.reason is not None for run in found)} of them did not end well")
    return out


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
    by_name = {figures.name: figures for figures in sets}
    groups: dict[str | None, str] = {figures.name: figures.title for figures in sets}
    groups |= {THEORY: "The theory", None: "Comparisons of other runs"}
    found: dict[str | None, list[dict[str, Any]]] = {name: [] for name in groups}
    for drawing in drawings(shown, report=left_out.append):
        content = drawing.render("png").get("png")
        if content is None:
            continue
        # The first chunk of every PNG states its size: with it, the page does not jump while it loads.
        width, height = struct.unpack(">II", content[16:24])
        figures = by_name.get(drawing.figure_set or "")
        axis = ""
        if drawing.panel is not None and drawing.grid is None:
            axis = ", against training time" if drawing.panel.against_time else ", against epochs"
        found[drawing.figure_set].append(
            {
                "name": drawing.stem,
                "title": drawing.title + axis,
                "alt": alt_text(drawing, figures),
                "source": "data:image/png;base64," + base64.b64encode(content).decode(),
                "width": width,
                "height": height,
                "is_whole": drawing.figure_set == THEORY or drawing.stem.startswith("paper-"),
            }
        )
    return [
        {
            "title": title,
            "pictures": found[name],
            "missing": _missing(by_name[name]) if name in by_name else [],
        }
        for name, title in groups.items()
        if found[name]
    ]


def _missing(figures: FigureSet) -> list[str]:
    """Return how the panels without a run are made."""
    commands: dict[str, list[str]] = {}
    for panel in PANELS:
        if panel not in figures.panels:
            commands.setdefault(panel.command, []).append(panel.number)
    return [
        f"Figure {', '.join(dict.fromkeys(numbers))}: no finished run; {command} makes one"
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
