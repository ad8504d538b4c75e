"""From runs to figure files: the paper's panels and page, and comparisons of whatever else was run."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import write_atomic

from ._cache import entry, is_fresh, read_inputs, write_inputs
from ._draw import ERRORS, LOSSES, draw
from ._draw_grid import draw_grid
from ._draw_page import draw_page
from ._draw_panel import draw_panel
from ._grid import Grid
from ._group import Comparison, compare
from ._load import Loaded, load_runs
from ._panels import FigureSet, Panel
from ._run import digest
from ._sort import figure_sets, other_grids
from ._style import house_style
from ._theory import TheoryFigure, comparable, theory_figures

_KINDS = {"loss": LOSSES, "error": ERRORS}
FORMATS = ("pdf", "png")
THEORY = "theory"
"""The figure set of the theory's figures."""
_PNG_DPI = 200
# Without these entries a file does not tell when and by which version it was made: same data, same bytes.
_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        stem: Its file name without ending, e.g. ``"fig1a-synthetic-laptop"``.
        title: What it shows, in words.
        panel: The paper's panel; ``None`` for the page and for comparisons.
        figure_set: Name of its figure set, ``"theory"`` for the theory's; ``None`` for comparisons.
        inputs: Hash of all that it shows.
        draw: Draws it; ``None`` as result if there is nothing to show.
        alt: For the theory's figures, the same in words for readers who cannot see it.
        grid: What it shows, if it is a heatmap.
    """

    stem: str
    title: str
    panel: Panel | None
    figure_set: str | None
    inputs: str
    draw: Callable[[], Figure | None]
    alt: str = ""
    grid: Grid | None = None

    def render(self, extension: str) -> bytes | None:
        """Return the file's content, the same bytes each time on one machine.

        Args:
            extension: ``"pdf"``, ``"png"`` or ``"svg"``.

        Returns:
            The bytes, or ``None`` if there is nothing to show.
        """
        return self.render_all((extension,)).get(extension)

    def render_all(self, extensions: tuple[str, ...]) -> dict[str, bytes]:
        """Draw once and return the content of several files, by extension; empty if there is nothing to show."""
        with house_style(math=self.figure_set == THEORY):
            figure = self.draw()
            if figure is None:
                return {}
            found = {}
            # Laid out once, at the pixels of the PNG, not for each file as savefig does: that would double the time.
            figure.set_dpi(_PNG_DPI)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            for extension in extensions:
                content = io.BytesIO()
                _write(figure, extension, content)
                found[extension] = content.getvalue()
        return found


def finished_runs(*roots: Path, report: Callable[[str], None] = say) -> Loaded:
    """Return the runs that can be shown, and report those that cannot.

    Args:
        *roots: Folders to search, to any depth.
        report: Called with one line for each run left out.

    Raises:
        InputError: There is no run that can be shown; the message says how to make one.
    """
    loaded = load_runs(*roots)
    for line in loaded.omitted:
        report(f"left out {line}")
    if not loaded:
        raise InputError(
            f"no finished run under {loaded.source}. Make some with `make demo` (a few minutes), or "
            "one with `python train.py trainer=laptop`."
        )
    return loaded


def drawings(loaded: Loaded, *, report: Callable[[str], None] = say) -> list[Drawing]:
    """Return all figures that runs give, without drawing them.

    Args:
        loaded: The runs.
        report: Called with one line for each thing a panel leaves out, and where code versions are mixed.
    """
    sets, rest = figure_sets(loaded)
    found: list[Drawing] = []
    for figures in sets:
        for note in figures.notes:
            report(note)
        found += _of_set(figures)
    for comparison in compare(rest):
        for kind, columns in _KINDS.items():
            found.append(_of_comparison(comparison.legible(), kind, columns))
    unfinished = [*loaded.unfinished, *loaded.waiting]
    found += [_of_grid(stem, grid) for stem, grid in other_grids(rest, unfinished)]
    theory, notes = comparable(loaded.theory)
    for note in notes:
        report(note)
    found += [_of_theory(figure) for figure in theory_figures(theory)]
    return found


def make_figures(
    loaded: Loaded, out: Path, *, force: bool = False, report: Callable[[str], None] = say
) -> list[Path]:
    """Draw the paper's panels and the comparisons of other runs as PDF and PNG.

    Two calls on one machine write the same bytes. A figure whose files are there, from the same inputs and the
    same code, is not drawn again.

    Args:
        loaded: The runs, of :func:`load_runs` or :func:`read_results`.
        out: Folder for the files; made if missing.
        force: Whether to draw everything.
        report: Called with one line for what panels leave out, and for what is up to date.

    Returns:
        The files that were drawn, in the order they were written.

    Raises:
        InputError: The folder cannot be made or written.
    """
    _check_writable(out)
    kept = read_inputs(out)
    written: list[Path] = []
    fresh = 0
    for drawing in drawings(loaded, report=report):
        paths = [out / f"{drawing.stem}.{extension}" for extension in FORMATS]
        if not force and is_fresh(kept.get(drawing.stem), drawing.inputs, paths):
            fresh += len(paths)
            continue
        contents = drawing.render_all(FORMATS)
        if not contents:
            continue
        for path in paths:
            write_atomic(path, contents[path.suffix[1:]])
        kept[drawing.stem] = entry(drawing.inputs, paths)
        # After each figure: a call that is stopped goes on where it was.
        write_inputs(out, kept)
        written += paths
    if fresh:
        report(f"{fresh} files in {out} are up to date")
    return written


def _of_set(figures: FigureSet) -> list[Drawing]:
    inputs = {family: _inputs_of(figures, family) for family in ("afad", "rsna", "curves", "grid")}
    found = [
        Drawing(
            f"{panel.key}-{figures.name}",
            f"Figure {panel.number}",
            panel,
            figures.name,
            digest([panel.key, inputs[panel.family], inputs["grid"] if panel.family == "curves" else ""]),
            lambda panel=panel: draw_panel(panel, figures),  # type: ignore[misc]
            grid=figures.grid if panel.family == "grid" else None,
        )
        for panel in figures.panels
    ]
    page = Drawing(
        f"paper-{figures.name}",
        "Figures 1 and 2 on one page",
        None,
        figures.name,
        digest(["page", figures.name, inputs]),
        lambda: draw_page(figures),
    )
    return [*found, page]


def _inputs_of(figures: FigureSet, family: str) -> str:
    if family == "grid" and figures.grid is not None:
        return _inputs_of_grid(figures.grid)
    return digest([[run.fingerprint for run in figures.runs(family)], []])


def _of_grid(stem: str, grid: Grid) -> Drawing:
    title = f"Loss over λ and α: {grid.title.splitlines()[0]}"
    return Drawing(
        f"grid-{stem}", title, None, None, _inputs_of_grid(grid), lambda: draw_grid(grid), grid=grid
    )


def _inputs_of_grid(grid: Grid) -> str:
    cells = [[pair, cell.state] for pair, cell in sorted(grid.cells.items())]
    return digest([[run.fingerprint for run in grid.runs], cells])


def _of_theory(figure: TheoryFigure) -> Drawing:
    inputs = digest([figure.stem, [repr(row) for row in figure.inputs]])
    return Drawing(
        figure.stem, f"{figure.number}: {figure.title}", None, THEORY, inputs, figure.draw, figure.alt
    )


def _of_comparison(comparison: Comparison, kind: str, columns: tuple[str, ...]) -> Drawing:
    shown = [[curve.label, [run.fingerprint for run in curve.runs]] for curve in comparison.curves]
    return Drawing(
        f"{kind}-{comparison.stem}",
        f"{kind.capitalize()}: {comparison.title}",
        None,
        None,
        digest([kind, comparison.stem, comparison.title, comparison.num_hidden, shown]),
        lambda: draw(comparison, columns),
    )


def _write(figure: Figure, extension: str, content: io.BytesIO) -> None:
    metadata = _METADATA[extension]
    if extension == "png":
        figure.set_dpi(_PNG_DPI)
        FigureCanvasAgg(figure).print_png(content, metadata=metadata)
    elif extension == "pdf":
        FigureCanvasPdf(figure).print_pdf(content, metadata=metadata)
    else:
        FigureCanvasSVG(figure).print_svg(content, metadata=metadata)


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
