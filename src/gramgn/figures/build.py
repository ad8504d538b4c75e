"""From runs to figure files: the paper's panels and page, the theory, and comparisons of whatever else was run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from gramgn.errors import InputError
from gramgn.figures.curves import Comparison, compare
from gramgn.figures.draw import ERRORS, LOSSES, draw_comparison, draw_panel
from gramgn.figures.drawing import Drawing
from gramgn.figures.grid import Grid
from gramgn.figures.heatmap import draw_grid
from gramgn.figures.page import draw_page
from gramgn.figures.panels import FigureSet, Panel, figure_sets, other_grids
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
        legible = comparison.legible()
        found.append(_of_comparison(legible, "loss", LOSSES))
        found.append(_of_comparison(legible, "error", ERRORS))
    found += [_of_grid(stem, grid) for stem, grid in other_grids(rest)]
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
    _check_writable(out)
    written: list[Path] = []
    for drawing in drawings(shown, report=report):
        for extension, content in drawing.render(*FORMATS).items():
            path = out / f"{drawing.stem}.{extension}"
            write_atomic(path, content)
            written.append(path)
    return written


def _of_set(figures: FigureSet) -> list[Drawing]:
    def draw(panel: Panel) -> Figure:
        if panel.family == "grid":
            assert figures.grid is not None
            return draw_grid(figures.grid, panel.number)
        return draw_panel(panel, figures.curves[panel.family])

    found = [
        Drawing(
            f"{panel.key}-{figures.name}",
            f"Figure {panel.number}",
            panel,
            figures.name,
            lambda panel=panel: draw(panel),  # type: ignore[misc]
            grid=figures.grid if panel.family == "grid" else None,
        )
        for panel in figures.panels
    ]
    title = "Figures 1 and 2 on one page"
    return [*found, Drawing(f"paper-{figures.name}", title, None, figures.name, lambda: draw_page(figures))]


def _of_grid(stem: str, grid: Grid) -> Drawing:
    title = f"Loss over λ and α: {grid.title.splitlines()[0]}"
    return Drawing(f"grid-{stem}", title, None, None, lambda: draw_grid(grid), grid=grid)


def _of_comparison(comparison: Comparison, kind: str, columns: tuple[str, ...]) -> Drawing:
    title = f"{kind.capitalize()}: {comparison.title}"
    return Drawing(
        f"{kind}-{comparison.stem}", title, None, None, lambda: draw_comparison(comparison, columns)
    )


def _check_writable(out: Path) -> None:
    """Fail before any work if a file cannot be written."""
    probe = out / ".write-test"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out.absolute()}: {error.strerror or error}") from error
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot write into {out.absolute()}: {reason}; choose another with --out"
        ) from error
