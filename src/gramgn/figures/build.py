"""From runs to figure files: the paper's panels and page, the theory, and comparisons of whatever else was run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gramgn.errors import InputError
from gramgn.figures.curves import compare
from gramgn.figures.draw import ERRORS, LOSSES, draw_comparison, draw_panel
from gramgn.figures.drawing import Drawing
from gramgn.figures.heatmap import draw_grid
from gramgn.figures.page import draw_page
from gramgn.figures.panels import FigureSet, figure_sets, other_grids
from gramgn.figures.sources import Shown
from gramgn.figures.theory import theory_figures
from gramgn.progress import say
from gramgn.records import ENDED, write_atomic

FORMATS = ("pdf", "png")


def drawings(shown: Shown, *, report: Callable[[str], None] = say) -> list[Drawing]:
    """Return all figures that runs give, without drawing them.

    Args:
        shown: The runs.
        report: Called with one line for runs that cannot share a panel, and where code versions are mixed.
    """
    sets, rest = figure_sets(shown.rows)
    found: list[Drawing] = []
    for figures in sets:
        for note in figures.notes:
            report(note)
        found += _of_set(figures)
    for comparison in compare(rest[rest.state.isin(ENDED)]):
        for kind, columns in (("loss", LOSSES), ("error", ERRORS)):
            draw = partial(draw_comparison, comparison.legible(), columns)
            found.append(
                Drawing(f"{kind}-{comparison.stem}", f"{kind.capitalize()}: {comparison.title}", draw)
            )
    for stem, grid in other_grids(rest):
        title = f"Loss over λ and α: {grid.title.splitlines()[0]}"
        found.append(Drawing(f"grid-{stem}", title, partial(draw_grid, grid), grid=grid))
    return [*found, *theory_figures(shown.theory)]


def make_figures(shown: Shown, out: Path, *, report: Callable[[str], None] = say) -> list[Path]:
    """Draw all figures as PDF and PNG. Two calls on one machine write the same bytes.

    Args:
        shown: The runs, of `read_runs`.
        out: Folder for the files; made if missing.
        report: Called with one line for what panels do not show.

    Returns:
        The files, in the order they were written.

    Raises:
        InputError: The folder cannot be made or written.
    """
    probe = out / ".write-test"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write into {out.absolute()}: {error.strerror or error}; choose another folder with --out"
        ) from error
    written: list[Path] = []
    for drawing in drawings(shown, report=report):
        rendered = drawing.render(*FORMATS)
        if not rendered:
            report(f"not drawn, as no run has a value above zero: {drawing.title}")
        for extension, content in rendered.items():
            path = out / f"{drawing.stem}.{extension}"
            write_atomic(path, content)
            written.append(path)
    return written


def _of_set(figures: FigureSet) -> list[Drawing]:
    found = []
    for panel in figures.panels:
        grid = figures.grid if panel.family == "grid" else None
        if grid is not None:
            draw = partial(draw_grid, grid, panel.number)
        else:
            draw = partial(draw_panel, panel, figures.curves[panel.family])
        title = f"Figure {panel.number}"
        found.append(Drawing(f"{panel.key}-{figures.name}", title, draw, panel, figures.name, grid=grid))
    page = partial(draw_page, figures)
    return [*found, Drawing(f"paper-{figures.name}", "Figures 1 and 2 on one page", page, None, figures.name)]
