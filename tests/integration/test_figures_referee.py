"""What a referee would say of a figure: words that hide data, numbers that differ from the text, odd units."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from figure_views import silent, texts
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gramgn.figures import Theory, drawings, house_style, read_runs, theory_claims


@pytest.fixture(scope="module")
def published(repository: Path) -> Theory:
    return read_runs(*sorted((repository / "outputs" / "results").glob("theory_*.csv"))).theory


@pytest.fixture(scope="module")
def figures(repository: Path) -> dict[str, Figure]:
    """Return the theory's figures, laid out."""
    files = sorted((repository / "outputs" / "results").glob("theory_*.csv"))
    found = {}
    for drawing in drawings(read_runs(*files), report=silent):
        with house_style(math=True):
            figure = drawing.draw()
            assert figure is not None
            FigureCanvasAgg(figure).draw()
        found[drawing.title[:2]] = figure
    return found


def points_under_legend(axes: Axes) -> list[tuple[str, tuple[float, float]]]:
    """Return the marked points that lie under the legend of a panel."""
    box = axes.get_legend().get_window_extent()
    hidden = []
    for line in axes.get_lines():
        if line.get_marker() in ("None", "", None):
            continue
        for x, y in axes.transData.transform(line.get_xydata()):
            if box.contains(x, y):
                hidden.append((str(line.get_label()), (x, y)))
    return hidden


@pytest.mark.parametrize("number", ["T1", "T2", "T3", "T4", "T5"])
def test_no_legend_of_the_theory_hides_a_point(figures: dict[str, Figure], number: str) -> None:
    assert len(figures[number].axes) >= 2
    for axes in figures[number].axes:
        assert not points_under_legend(axes)


def test_a_point_under_a_legend_is_found() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0.5], [0.5], "o", label="hidden")
    axes.legend(loc="center")
    FigureCanvasAgg(figure).draw()
    assert points_under_legend(axes)


@pytest.mark.parametrize("number", ["T1", "T2", "T3", "T5"])
def test_bands_and_bars_are_explained(figures: dict[str, Figure], number: str) -> None:
    assert "least to greatest" in texts(figures[number])


def test_exponents_of_the_cost_figure_are_those_of_the_statements(
    published: Theory, figures: dict[str, Figure]
) -> None:
    (claim,) = (claim for claim in theory_claims(published) if claim.key == "exponents")
    medians = {each.name: statistics.median(each.values.values()) for each in claim.measurements}
    left, right = ([text.get_text() for text in axes.get_legend().get_texts()] for axes in figures["T5"].axes)
    for labels, axis in ((left, "b"), (right, "m")):
        for part, words in (("(A)", "(A), forward"), ("(B) Gram", "the Gram product")):
            (value,) = (
                value
                for name, value in medians.items()
                if name.startswith(f"exponent of {axis}") and words in name
            )
            (label,) = (label for label in labels if label.startswith(part))
            assert label.endswith(f"${axis}^{{{value:.2f}}}$")


PAGES = ("README.md", "docs/theory.md", "outputs/results/README.md")


def commands_with_results(repository: Path) -> list[str]:
    found = []
    for page in PAGES:
        text = (repository / page).read_text(encoding="utf-8")
        found += re.findall(r'^make figures (RESULTS="?[^"\n#<]+"?)', text, re.MULTILINE)
    return found


def test_published_commands_give_make_all_their_files(repository: Path) -> None:
    """A list with line breaks would be cut after its first file, and the rest run as commands."""
    commands = commands_with_results(repository)
    assert len(commands) >= 2
    for command in commands:
        expanded = subprocess.run(
            ["bash", "-c", f"printf '%s' {command.strip()}"],
            capture_output=True,
            text=True,
            check=True,
            cwd=repository,
        )
        shown = subprocess.run(
            ["make", "-n", "--no-print-directory", f"VENV={sys.prefix}", "figures", expanded.stdout],
            capture_output=True,
            text=True,
            check=True,
            cwd=repository,
        )
        last = shown.stdout.splitlines()[-1]
        pattern = last.split("--results ", 1)[1]
        assert all(list(repository.glob(each)) for each in pattern.split())
