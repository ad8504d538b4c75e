"""What tests of figures look at: the figure sets of a folder, its panels drawn, the words in them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gramgn.figures import (
    Drawing,
    FigureSet,
    Grid,
    Shown,
    drawings,
    figure_sets,
    house_style,
    read_runs,
    read_table,
)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str, *arguments: object, outputs: Path | None = None) -> CompletedProcess[str]:
    """Run a script's command line in this process, with another folder for its outputs if one is given."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if outputs is not None:
        module.OUTPUTS = outputs  # type: ignore[attr-defined]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = module.main([str(word) for word in arguments])
    return CompletedProcess(name, code, out.getvalue(), err.getvalue())


def silent(line: str) -> None:
    """Take a report and forget it."""


def shown(*sources: Path) -> Shown:
    """Return what can be drawn of some folders or files."""
    return read_runs(*sources, report=silent)


def notes(*sources: Path) -> list[str]:
    """Return what is reported when all figures of some folders or files are listed."""
    lines: list[str] = []
    drawings(read_table(*sources, report=lines.append)[1], report=lines.append)
    return lines


def only_set(root: Path) -> FigureSet:
    """Return the figure set of the runs below a folder, which give exactly one."""
    (figures,), _ = figure_sets(shown(root).rows)
    return figures


def only_grid(root: Path) -> Grid:
    """Return figure 2c of the runs below a folder."""
    grid = only_set(root).grid
    assert grid is not None
    return grid


def listed(*sources: Path) -> dict[str, Drawing]:
    """Return all drawings of some folders or files by stem."""
    return {drawing.stem: drawing for drawing in drawings(shown(*sources), report=silent)}


def drawn(source: Path | Mapping[str, Drawing], stem: str) -> Figure:
    """Draw the one figure of a folder, or of what is listed of it, whose name begins with a stem, e.g. `"fig1a"`."""
    found = listed(source) if isinstance(source, Path) else source
    (drawing,) = (each for name, each in found.items() if name.startswith(stem))
    with house_style():
        figure = drawing.draw()
    assert figure is not None
    return figure


def xy(axes: Axes, line: int = 0) -> list[list[float]]:
    """Return the points of a line."""
    return axes.get_lines()[line].get_xydata().tolist()


def labels(figure: Figure) -> list[str]:
    """Return the texts of the legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def texts(figure: Figure) -> str:
    """Return all words of a figure, legends included."""
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda each: hasattr(each, "get_text")))
