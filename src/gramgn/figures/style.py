"""How figures look: bundled fonts, colours that colour-blind readers can distinguish, no trace of the day."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.figure import FigureBase

from gramgn.figures.curves import Curve

# Whatever MPLBACKEND or DISPLAY say: nothing here ever opens a window.
matplotlib.use("Agg")

# Okabe and Ito's palette, without its yellow, which is too light for a line.
_BLUE, _ORANGE, _VERMILION, _GREEN = "#0072B2", "#E69F00", "#D55E00", "#009E73"
_PURPLE, _SKY, _GREY, _BLACK = "#CC79A7", "#56B4E9", "#7F7F7F", "#000000"
PALETTE = (_BLUE, _VERMILION, _GREEN, _PURPLE, _BLACK)
"""For lines that no network or optimizer has the colour of."""
_SPARE = (_PURPLE, _SKY, _BLACK, _GREY, _GREEN, _BLUE, _ORANGE, _VERMILION)
_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2), (7, 2), (2, 1))

_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    # TrueType, not Type 3: publishers ask for it, and text in the PDF can be selected.
    "pdf.fonttype": 42,
    "svg.hashsalt": "gramgn",
}


@dataclass(frozen=True)
class LineStyle:
    """Colour and dashes of one curve.

    Attributes:
        color: As hexadecimal RGB.
        dashes: On and off lengths in line widths; empty for a solid line.
        marked: Whether hollow circles stand on the line: it is ours, not the paper's.
    """

    color: str
    dashes: tuple[float, ...]
    marked: bool = False

    @property
    def pattern(self) -> Any:
        """The dashes as matplotlib takes them."""
        return (0, self.dashes) if self.dashes else "solid"


# The three curves of the paper look the same in every figure; so do the other networks we ship.
_FIXED = {
    ("ggn", "resnet_fixup"): LineStyle(_VERMILION, ()),
    ("sgd", "resnet_bn"): LineStyle(_BLUE, (4, 1.5)),
    ("sgd", "resnet_fixup"): LineStyle(_ORANGE, (1, 1.2)),
    ("ggn", "resnet_gn"): LineStyle(_GREEN, (4, 1.2, 1, 1.2)),
    ("adamw", "resnet_bn"): LineStyle(_PURPLE, (7, 2)),
    ("sgd", "resnet_gn"): LineStyle(_SKY, (2, 1)),
    ("ggn_spring", "resnet_gn"): LineStyle(_BLACK, (4, 1.2, 1, 1.2)),
    ("ggn_recommended", "resnet_gn"): LineStyle(_VERMILION, (7, 2)),
    ("adamw", "resnet_gn"): LineStyle(_BLUE, (1, 1.2)),
    ("muon", "resnet_bn"): LineStyle(_GREY, ()),
}


def line_styles(curves: Sequence[Curve]) -> list[LineStyle]:
    """Return a style for each curve, no two alike as long as there are styles left."""
    used: dict[int, LineStyle] = {}
    for place, curve in enumerate(curves):
        first = curve.rows.iloc[0]
        style = _FIXED.get((first.optimizer, first.model)) if curve.has_own_style else None
        if style is not None and style not in used.values():
            used[place] = style
    for place in range(len(curves)):
        if place not in used:
            used[place] = _spare_style(list(used.values()))
    ordered = [used[place] for place in range(len(curves))]
    return [replace(style, marked=curve.is_ours) for curve, style in zip(curves, ordered, strict=True)]


def _spare_style(used: Sequence[LineStyle]) -> LineStyle:
    """Return a style that nothing has, of the dashes and then of the colour that the fewest lines have.

    Dashes come first: in grey print nothing else distinguishes two lines.
    """
    dashes, colors = Counter(style.dashes for style in used), Counter(style.color for style in used)
    reserved = {*used, *_FIXED.values()}
    spare = [LineStyle(color, pattern) for pattern in _DASHES for color in _SPARE]
    spare = [style for style in spare if style not in reserved] or [LineStyle(_BLACK, ())]
    return min(spare, key=lambda style: (dashes[style.dashes], colors[style.color]))


@contextmanager
def house_style(*, math: bool = False) -> Iterator[None]:
    """Use our settings alone, whatever the user's matplotlibrc says, and put the old ones back afterwards.

    Args:
        math: Whether text between dollar signs is a formula; the user's own words then go through `as_words`.
    """
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name in letters that the bundled font lacks is drawn as boxes; tables and the report spell it out.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS | {"text.parse_math": math})
        yield


def explain(figure: FigureBase, handles: Any, labels: Sequence[str], title: str, **style: Any) -> None:
    """Add a legend below the panels, with the small print as its title."""
    legend = figure.legend(handles, labels, loc="outside lower center", title=title, **style)
    legend.get_title().set_color("#555555")
    legend.get_title().set_multialignment("center")


def as_words(text: str) -> str:
    """Return a user's text for a figure with formulas, in which its dollar signs are no formula's."""
    return text.replace("$", r"\$")
