"""Figures as the page holds them: the PNG itself, within the page."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from pathlib import Path

from gramgn.errors import InputError
from gramgn.figures import PANELS, THEORY, Drawing, FigureSet

from ._alt import grid_alt, panel_alt, set_title

_PNG = b"\x89PNG\r\n\x1a\n"
_COMPARISON_ALT = "{}: lines against training time on the left and against epochs on the right."


@dataclass(frozen=True)
class Picture:
    """One figure.

    Attributes:
        name: Its file's name without the ending.
        title: What it shows.
        alt: The same for readers who cannot see it: axes, curves, what became of them.
        source: A ``data:`` address that holds the whole PNG.
        width: In pixels.
        height: In pixels.
        is_whole: Whether it takes the whole width of the page.
    """

    name: str
    title: str
    alt: str
    source: str
    width: int
    height: int
    is_whole: bool


@dataclass(frozen=True)
class PictureSet:
    """The figures of one data kind, scale and device.

    Attributes:
        title: What they have in common.
        pictures: In the order of the paper.
        missing: What could not be drawn, one line each with the reason.
    """

    title: str
    pictures: list[Picture]
    missing: list[str]


def picture_sets(sets: list[FigureSet], drawings: list[Drawing], folder: Path) -> list[PictureSet]:
    """Return the drawn figures: those of the paper set by set, the theory's, the comparisons of other runs.

    Args:
        sets: Figure sets.
        drawings: All figures of the same runs.
        folder: Where their PNG files lie; a figure that had nothing to show has none.

    Raises:
        InputError: A file cannot be read or is no PNG.
    """
    drawn = [drawing for drawing in drawings if _file(drawing, folder).is_file()]
    found = []
    for figures in sets:
        own = [drawing for drawing in drawn if drawing.figure_set == figures.name]
        found.append(
            PictureSet(set_title(figures), [_of_set(one, figures, folder) for one in own], _missing(figures))
        )
    theory = [drawing for drawing in drawn if drawing.figure_set == THEORY]
    if theory:
        whole = [picture(_file(one, folder), one.title, one.alt, is_whole=True) for one in theory]
        found.append(PictureSet("The theory", whole, []))
    rest = [drawing for drawing in drawn if drawing.figure_set is None]
    if rest:
        pictures = [
            picture(
                _file(one, folder),
                one.title,
                grid_alt(one.grid) if one.grid else _COMPARISON_ALT.format(one.title),
            )
            for one in rest
        ]
        found.append(PictureSet("Comparisons of other runs", pictures, []))
    return found


def picture(path: Path, title: str, alt: str, *, is_whole: bool = False) -> Picture:
    """Return a figure ready for the page.

    Args:
        path: A PNG file.
        title: What it shows.
        alt: A text instead of it.
        is_whole: Whether it takes the whole width of the page.

    Raises:
        InputError: The file cannot be read or is no PNG.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the figure {path}: {error.strerror or error}") from error
    if not content.startswith(_PNG) or len(content) < 24:
        raise InputError(f"{path} is not a PNG file; remove it, `make figures` draws it again")
    # The first chunk of every PNG is its header: width and height, so that the page does not jump while it loads.
    width, height = struct.unpack(">II", content[16:24])
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    return Picture(path.stem, title, alt, address, width, height, is_whole)


def _of_set(drawing: Drawing, figures: FigureSet, folder: Path) -> Picture:
    path = _file(drawing, folder)
    if drawing.panel is None:
        numbers = ", ".join(dict.fromkeys(panel.number for panel in figures.panels))
        return picture(
            path, drawing.title, f"The figures {numbers} above, together on one page.", is_whole=True
        )
    axis = "against training time" if drawing.panel.against_time else "against epochs"
    title = drawing.title if drawing.panel.family == "grid" else f"{drawing.title}, {axis}"
    return picture(path, title, panel_alt(drawing.panel, figures))


def _missing(figures: FigureSet) -> list[str]:
    absent = [panel for panel in PANELS if panel not in figures.panels]
    commands: dict[str, list[str]] = {}
    for panel in absent:
        numbers = commands.setdefault(panel.command, [])
        if panel.number not in numbers:
            numbers.append(panel.number)
    return [
        f"Figure {', '.join(numbers)}: no finished run; {command} makes one"
        for command, numbers in commands.items()
    ]


def _file(drawing: Drawing, folder: Path) -> Path:
    return folder / f"{drawing.stem}.png"
