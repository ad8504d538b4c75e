"""A contact sheet: images of a data set as a network will see them, sorted by target, on one page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gramgn.data.types import SPLITS, RegressionData
from gramgn.errors import DataError
from gramgn.files import writing
from gramgn.records import atomic_file

SMALLEST_TILE, LARGEST_TILE = 64, 160  # pixels
CAPTION, TITLE, GAP = 13, 22, 3  # pixels
PAPER, INK = (255, 255, 255), (0, 0, 0)


def contact_sheet(data: RegressionData, columns: int = 12, rows: int = 8) -> Image.Image:
    """Draw a page of samples from the smallest target (top left) to the largest, evenly spaced by rank.

    Every tile shows its target and split; the title shows the name, the counts and the unit. A synthetic set is
    marked SYNTHETIC.

    Args:
        data: A prepared data set of images.
        columns: Number of tiles per row.
        rows: Largest number of rows.

    Returns:
        An RGB picture.

    Raises:
        DataError: The data set is empty or does not hold images.
    """
    if data.images.ndim != 4 or data.images.dtype != np.uint8 or data.images.shape[1] not in (1, 3):
        raise DataError(
            f"dataset {data.name}: a contact sheet needs uint8 images [N, 1 or 3, H, W], "
            f"but this data is {data.images.dtype} {list(data.images.shape)}"
        )
    if len(data.targets) == 0:
        raise DataError(f"dataset {data.name}: there is nothing to draw, the data set is empty")
    order, num = np.argsort(data.targets, kind="stable"), min(columns * rows, len(data.targets))
    picked = order[np.unique(np.round(np.linspace(0, len(order) - 1, num)).astype(np.intp))]
    rows = -(-len(picked) // columns)  # no empty rows below a small set
    width, height = _tile_size(data.images.shape[3], data.images.shape[2])
    # Enlarged pixels stay visible as squares.
    is_enlarged = width >= data.images.shape[3]
    resampling = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.BILINEAR
    page_size = (columns * (width + GAP) + GAP, TITLE + rows * (height + CAPTION + GAP) + GAP)
    page = Image.new("RGB", page_size, PAPER)
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default()
    pen.text((GAP + 1, 4), _title(data), fill=INK, font=font)
    for place, index in enumerate(picked):
        x = GAP + place % columns * (width + GAP)
        y = TITLE + place // columns * (height + CAPTION + GAP)
        tile = np.repeat(data.images[index], 3 // data.images.shape[1], axis=0).transpose(1, 2, 0)
        resized = Image.fromarray(np.ascontiguousarray(tile)).resize((width, height), resampling)
        page.paste(resized, (x, y))
        caption = f"{data.targets[index]:.4g} {data.split[index]}"
        pen.text((x, y + height), caption, fill=INK, font=font)
    return page


def save_contact_sheet(data: RegressionData, path: Path, columns: int = 12, rows: int = 8) -> None:
    """Write `contact_sheet` as a PNG file that is whole once it has its name.

    Args:
        data: A prepared data set of images.
        path: The file; its folder is created.
        columns: Number of tiles per row.
        rows: Largest number of rows.

    Raises:
        DataError: No images, or a folder that cannot be created.
        InputError: A full disk, or a folder that cannot be written.
    """
    page = contact_sheet(data, columns, rows)
    with writing(path.parent, "out"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        page.save(temporary, "PNG")


def _title(data: RegressionData) -> str:
    counts = ", ".join(f"{int((data.split == split).sum()):,} {split}" for split in SPLITS)
    mark = "SYNTHETIC " if data.kind == "synthetic" else ""
    height, width = data.images.shape[2:]
    low, high = data.targets.min(), data.targets.max()
    return f"{mark}{data.name}: {counts}; {width}x{height}; target {low:.4g} to {high:.4g} {data.unit}"


def _tile_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of a tile: small images are enlarged by a whole factor, large ones are reduced."""
    side = max(width, height)
    if side < SMALLEST_TILE:
        factor = -(-SMALLEST_TILE // side)
        return width * factor, height * factor
    shrink = min(1.0, LARGEST_TILE / side)
    return max(1, round(width * shrink)), max(1, round(height * shrink))
