"""A colour picture with its own tilted coordinates, painted shape by shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gramgn.synthetic.shapes import (
    Floats,
    Point,
    Window,
    arc_distance,
    axes,
    box_distance,
    coverage,
    ellipse_distance,
    window,
)

Colour = tuple[float, float, float]
Distance = Callable[[Floats, Floats], Floats]


class Sketch(NamedTuple):
    """A picture and the place, size and tilt of the drawing in it.

    In the drawing's coordinates x grows to the right and y downwards, 1 is `scale` pixels, and the origin is the
    middle of the face. All methods take the middle (x, y) of a shape and its lengths in these units, and its tilt in
    degrees clockwise.
    """

    image: Floats  # colours [3, H, W] in [0, 1], painted in place
    origin: Point  # in pixels
    scale: float  # pixels per unit
    angle: float  # of the whole drawing in radians, clockwise
    softness: float  # width of an edge in pixels

    def local(self, x: float, y: float, reach: float, tilt: float = 0.0) -> tuple[Window, Floats, Floats]:
        """Return the window of half side `reach` around a point, and pixel offsets from it: right and down."""
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        centre = (
            self.origin[0] + self.scale * (x * cos - y * sin),
            self.origin[1] + self.scale * (x * sin + y * cos),
        )
        win = window(self.image.shape[1:], centre, centre, reach * self.scale + self.softness)
        angle = self.angle + math.radians(tilt)
        return win, *axes(win, centre, (math.cos(angle), math.sin(angle)))

    def paint(self, win: Window, cover: Floats, colour: Colour, strength: float = 1.0) -> None:
        """Mix a colour into the picture where `cover` (`[h, w]` in [0, 1]) says."""
        target = win.of(self.image)
        cover = cover * np.float32(strength)
        target += cover * (np.array(colour, np.float32)[:, None, None] - target)

    def ellipse(
        self,
        x: float,
        y: float,
        half_x: float,
        half_y: float,
        colour: Colour,
        *,
        strength: float = 1.0,
        tilt: float = 0.0,
        blur: float = 1.0,
        clip: Distance | None = None,
    ) -> None:
        """Paint an ellipse.

        Args:
            x: Its middle.
            y: Its middle.
            half_x: Half its width.
            half_y: Half its height.
            colour: What to mix in.
            strength: Share of `colour` in the mixture, in [0, 1].
            tilt: Tilt in degrees.
            blur: Factor on the softness of the edge.
            clip: Distance of a further shape, of pixel offsets from (x, y): only what is inside both is painted.
        """
        soft = self.softness * blur
        win, u, v = self.local(x, y, max(half_x, half_y) + soft / self.scale, tilt)
        d = ellipse_distance(u, v, half_x * self.scale, half_y * self.scale)
        if clip is not None:
            d = np.maximum(d, clip(u, v))
        self.paint(win, coverage(d, soft), colour, strength)

    def box(self, x: float, y: float, half_x: float, half_y: float, corner: float, colour: Colour) -> None:
        """Paint a rounded box."""
        win, u, v = self.local(x, y, half_x + half_y)
        across, along = np.float32(half_x * self.scale), np.float32(half_y * self.scale)
        d = box_distance(np.abs(u) - across, np.abs(v) - along, corner * self.scale)
        self.paint(win, coverage(d, self.softness), colour)

    def stroke(
        self,
        x: float,
        y: float,
        half_length: float,
        bend: float,
        half_width: float,
        *,
        dark: float,
        tilt: float = 0.0,
        colour: Colour | None = None,
    ) -> None:
        """Draw a tapered curved line, darkening what lies under it or painting a colour.

        A line thinner than a pixel is drawn one pixel wide and accordingly weaker, so that a line's darkness
        does not depend on the size of the picture.

        Args:
            x: Its middle.
            y: Its middle.
            half_length: Half the chord.
            bend: How far the ends lie below the middle (without tilt).
            half_width: Half its width.
            dark: Strength in [0, 1].
            tilt: Tilt in degrees.
            colour: What to paint; None darkens.
        """
        if dark <= 0:
            return
        win, u, v = self.local(x, y, half_length + abs(bend) + 2 * half_width, tilt)
        thin = half_width * self.scale
        strength = dark * min(1.0, 2 * thin)
        d = arc_distance(u, v, half_length * self.scale, bend * self.scale, max(thin, 0.5))
        cover = coverage(d, self.softness)
        if colour is not None:
            self.paint(win, cover, colour, strength)
            return
        # Creases let more red through than blue.
        factors = np.array((1 - 0.85 * strength, 1 - strength, 1 - strength), np.float32)
        target = win.of(self.image)
        target *= 1 + cover * (factors[:, None, None] - 1)
