"""What a sweep leaves on W&B when it ends: one summary run with its cells as a table and its heatmap."""

from __future__ import annotations

from pathlib import Path

from gramgn.app import TrackingConfig
from gramgn.tracking import UploadOptions
from gramgn.tracking import log_summary as log_to_wandb

# Reading the records and drawing, beside W&B's own limits.
_DRAWING_S = 20.0


def log_summary(folder: Path, tracking: TrackingConfig) -> None:
    """Mirror a sweep's summary; call it when all records are on disk.

    It ends within ``init_timeout_s + finish_timeout_s`` and 20 seconds, and what fails is said in one line.
    A second call of a sweep in which nothing has changed sends nothing.

    Args:
        folder: The sweep's folder.
        tracking: That of its runs; mode ``"none"`` does nothing.
    """
    if tracking.mode == "none":
        return
    options = UploadOptions(
        tracking.mode,
        tracking.project,
        tracking.entity,
        timeout_s=max(tracking.init_timeout_s, tracking.finish_timeout_s),
    )
    limit_s = tracking.init_timeout_s + tracking.finish_timeout_s + _DRAWING_S
    log_to_wandb(folder, draw_heatmap, options, limit_s)


def draw_heatmap(folder: Path, png: Path) -> bool:
    """Draw the heatmap of a sweep over lambda and alpha (figure 2c, or another) into a file; False if it is none.

    Args:
        folder: The sweep's folder.
        png: The file.
    """
    # Only at the end of a sweep: importing it brings matplotlib.
    from gramgn.figures import drawings, load_runs

    found = drawings(load_runs(folder), report=lambda line: None)
    grids = [drawing for drawing in found if drawing.grid is not None]
    content = grids[0].render("png") if grids else None
    if content is None:
        return False
    png.write_bytes(content)
    return True
