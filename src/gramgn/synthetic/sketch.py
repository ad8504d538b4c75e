"""A colour picture with its own tilted coordinates, painted shape by shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Sketch:
    """A picture and the place, size and tilt of the drawing in it.

    In the drawing's coordinates x grows to the right and y downwards, 1 is `scale` pixels, and the origin
    is the middle of the face.

    Attributes:
        image: Colours `[3, H, W]` in [0, 1], painted in place.
        origin: Pixel of the drawing's origin, (x, y).
        scale: Pixels per unit.
        angle: Tilt of the whole drawing in radians, clockwise.
        softness: Width of an edge in pixels.
    """

    image: Floats
    origin: Point
    scale: float
    angle: float
    softness: float

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[1], self.image.shape[2]

    def place(self, x: float, y: float) -> Point:
        """Return the pixel coordinates of a point of the drawing."""
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return (
            self.origin[0] + self.scale * (x * cos - y * sin),
            self.origin[1] + self.scale * (x * sin + y * cos),
        )

    def local(
        self, x: float, y: float, reach: float, tilt: float = 0.0
    ) -> tuple[Window, Floats, Floats] | None:
        """Return the window around a point with pixel offsets `u` (right) and `v` (down) from it.

        Args:
            x: Middle of the window.
            y: Middle of the window.
            reach: Half its side, in units.
            tilt: Turn of `u` and `v` against the drawing, in degrees clockwise.
        """
        centre = self.place(x, y)
        win = window(self.shape, centre, centre, reach * self.scale + self.softness)
        if win is None:
            return None
        angle = self.angle + math.radians(tilt)
        u, v = axes(win, centre, (math.cos(angle), math.sin(angle)))
        return win, u, v

    def paint(self, win: Window, cover: Floats, colour: Colour, strength: float = 1.0) -> None:
        """Mix a colour into the picture where `cover` (`[h, w]` in [0, 1]) says."""
        target = win.of(self.image)
        cover = cover * np.float32(strength)
        target += cover * (np.array(colour, np.float32)[:, None, None] - target)

    def shade(self, win: Window, cover: Floats, factor: float | Colour) -> None:
        """Multiply the picture by a factor (one a channel, or one for all) where `cover` says."""
        factors = np.broadcast_to(np.asarray(factor, np.float32), (3,))
        target = win.of(self.image)
        target *= 1 + cover * (factors[:, None, None] - 1)

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
            half_x: Half its width, in units.
            half_y: Half its height, in units.
            colour: What to mix in.
            strength: How much of it, in [0, 1].
            tilt: Turn in degrees clockwise.
            blur: Factor on the softness of the edge.
            clip: Distance of a further shape, of pixel offsets from (x, y): only what is inside both is
                painted.
        """
        soft = self.softness * blur
        found = self.local(x, y, max(half_x, half_y) + soft / self.scale, tilt)
        if found is None:
            return
        win, u, v = found
        d = ellipse_distance(u, v, half_x * self.scale, half_y * self.scale)
        if clip is not None:
            d = np.maximum(d, clip(u, v))
        self.paint(win, coverage(d, soft), colour, strength)

    def box(self, x: float, y: float, half_x: float, half_y: float, corner: float, colour: Colour) -> None:
        """Paint a rounded box; all lengths in units."""
        found = self.local(x, y, half_x + half_y)
        if found is None:
            return
        win, u, v = found
        d = box_distance(
            np.abs(u) - np.float32(half_x * self.scale),
            np.abs(v) - np.float32(half_y * self.scale),
            corner * self.scale,
        )
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
            half_length: Half the chord, in units.
            bend: How far the ends lie below the middle (for no tilt), in units.
            half_width: Half its width, in units.
            dark: Strength in [0, 1].
            tilt: Turn in degrees clockwise.
            colour: What to paint; None darkens.
        """
        if dark <= 0:
            return
        found = self.local(x, y, half_length + abs(bend) + 2 * half_width, tilt)
        if found is None:
            return
        win, u, v = found
        thin = half_width * self.scale
        strength = dark * min(1.0, 2 * thin)
        d = arc_distance(u, v, half_length * self.scale, bend * self.scale, max(thin, 0.5))
        cover = coverage(d, self.softness)
        if colour is None:
            # Creases let more red through than blue.
            self.shade(win, cover, (1 - 0.85 * strength, 1 - strength, 1 - strength))
        else:
            self.paint(win, cover, colour, strength)
