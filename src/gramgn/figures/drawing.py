"""A figure that can be drawn, and the files it is written to."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from gramgn.figures.grid import Grid
from gramgn.figures.panels import Panel
from gramgn.figures.style import house_style

THEORY = "theory"
"""The figure set of the theory's figures."""
_PNG_DPI = 200
# Without these entries a file does not state when and by which version it was made: same data, same bytes.
_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        stem: Its file name without ending, e.g. `"fig1a-synthetic-laptop"`.
        title: What it shows, in words.
        draw: Draws it; returns None if there is nothing to show.
        panel: The paper's panel; None for the page and for comparisons.
        figure_set: Name of its figure set, `"theory"` for the theory's; empty for comparisons.
        alt: For the theory's figures, the same in words for readers who cannot see it.
        grid: What it shows, if it is a heatmap.
    """

    stem: str
    title: str
    draw: Callable[[], Figure | None]
    panel: Panel | None = None
    figure_set: str = ""
    alt: str = ""
    grid: Grid | None = None

    def render(self, *extensions: str) -> dict[str, bytes]:
        """Draw once and return the content of files, the same bytes each time on one machine.

        Args:
            *extensions: `"pdf"`, `"png"` or `"svg"`.

        Returns:
            The bytes by extension; empty if there is nothing to show.
        """
        with house_style(math=self.figure_set == THEORY):
            figure = self.draw()
            if figure is None:
                return {}
            # Laid out once, at the pixels of the PNG, not for each file as savefig does: that would double the time.
            figure.set_dpi(_PNG_DPI)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            return {extension: _content(figure, extension) for extension in extensions}


def _content(figure: Figure, extension: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=extension, dpi=_PNG_DPI, metadata=_METADATA[extension])
    return content.getvalue()
