"""The heatmap of a sweep, for its summary on W&B."""

from __future__ import annotations

from pathlib import Path

from gramgn.records import write_atomic


def draw_heatmap(folder: Path, png: Path) -> bool:
    """Draw the heatmap of a sweep over lambda and alpha into a file; return whether it is such a sweep."""
    # Only at the end of a sweep: importing it brings matplotlib and pandas.
    from gramgn.figures import drawings, read_table

    _, shown = read_table(folder, report=lambda line: None)
    grids = [drawing for drawing in drawings(shown, report=lambda line: None) if drawing.grid is not None]
    content = grids[0].render("png") if grids else {}
    if not content:
        return False
    write_atomic(png, content["png"])
    return True
