"""Anti-aliased shapes from signed distances, each evaluated only in its own small window of the picture.

A shape's distance is in pixels, negative inside. Coverage is a linear ramp of the distance, `softness`
pixels wide: one pixel is a plain anti-aliased edge, more is a blurred one. There is no supersampling
anywhere.

Array work uses only `+ - * /`, square roots, comparisons and clipping, which IEEE 754 rounds alike
everywhere; exponentials and powers, which vector libraries round differently, are left to scalars.

In all modules `u` runs along a shape's axis and `v` across it, `d` is the signed distance, all in pixels and
float32 arrays `[h, w]` of a window. Points are `(x, y)` in pixels with y pointing down; pixel (row, column) has its
centre at (x, y) = (column, row).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]
Floats = NDArray[np.float32]


class Window(NamedTuple):
    """A rectangle of the picture, possibly empty, with pixel centres `x` (`[1, w]`) and `y` (`[h, 1]`)."""

    rows: slice
    cols: slice
    x: Floats
    y: Floats

    def of(self, layer: Floats) -> Floats:
        """Return the view of `layer` (`[..., H, W]`) that this window covers."""
        return layer[..., self.rows, self.cols]


def window(shape: tuple[int, ...], one: Point, other: Point, margin: float = 0.0) -> Window:
    """Return the window around two opposite corners of a box, `margin` pixels wider on every side."""
    (x0, x1), (y0, y1) = (sorted(pair) for pair in zip(one, other, strict=True))
    left, top = max(0, math.floor(x0 - margin)), max(0, math.floor(y0 - margin))
    right = max(left, min(shape[1], math.ceil(x1 + margin) + 1))
    bottom = max(top, min(shape[0], math.ceil(y1 + margin) + 1))
    x = np.arange(left, right, dtype=np.float32)[None, :]
    y = np.arange(top, bottom, dtype=np.float32)[:, None]
    return Window(slice(top, bottom), slice(left, right), x, y)


def whole(shape: tuple[int, int]) -> Window:
    """Return the window that is the whole picture of `(H, W)` pixels."""
    return window(shape, (0, 0), (shape[1] - 1, shape[0] - 1))


def axes(win: Window, origin: Point, direction: Point) -> tuple[Floats, Floats]:
    """Return `u, v` (each `[h, w]`): coordinates from `origin` along a unit direction and across it."""
    dx, dy = direction
    u = (win.x - np.float32(origin[0])) * np.float32(dx) + (win.y - np.float32(origin[1])) * np.float32(dy)
    v = (win.x - np.float32(origin[0])) * np.float32(-dy) + (win.y - np.float32(origin[1])) * np.float32(dx)
    return u, v


def unit(start: Point, end: Point) -> tuple[Point, float]:
    """Return the unit direction from `start` to `end` and the distance in pixels."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = max(math.hypot(dx, dy), 1e-6)
    return (dx / length, dy / length), length


def clipped(values: Floats) -> Floats:
    """Return the values limited to [0, 1]; on small arrays half the time of `np.clip`."""
    return np.minimum(np.maximum(values, 0), 1)


def coverage(d: Floats, softness: float) -> Floats:
    """Return how much of each pixel lies inside, in [0, 1]: a ramp `softness` pixels wide around d = 0."""
    return clipped(np.float32(0.5) - d * np.float32(1.0 / softness))


def box_distance(across: Floats, along: Floats, corner: float | Floats) -> Floats:
    """Return the distance of a rounded box from the distances `|v| - half_width` and `|u| - half_length`.

    A `corner` of half the width gives a stadium or an ellipse-like blob.
    """
    a, b = across + corner, along + corner
    outside_a, outside_b = np.maximum(a, 0), np.maximum(b, 0)
    outside = np.sqrt(outside_a * outside_a + outside_b * outside_b)
    return outside + np.minimum(np.maximum(a, b), 0) - corner


def ellipse_distance(u: Floats, v: Floats, half_u: float, half_v: float) -> Floats:
    """Return an ellipse's distance to first order: exact on the outline, good near it."""
    pu, pv = u * np.float32(1 / half_u), v * np.float32(1 / half_v)
    gu, gv = pu * np.float32(1 / half_u), pv * np.float32(1 / half_v)
    f = pu * pu + pv * pv
    slope = np.sqrt(gu * gu + gv * gv) + np.float32(1e-6)
    return (f - 1) * np.float32(0.5) / slope


def cone_distance(u: Floats, v: Floats, length: float, radius0: float, radius1: float) -> Floats:
    """Return the distance of a capsule whose radius goes linearly from `radius0` (u = 0) to `radius1`."""
    share = clipped(u * np.float32(1 / length))
    past = u - share * np.float32(length)
    return np.sqrt(past * past + v * v) - (np.float32(radius0) + share * np.float32(radius1 - radius0))


def arc_distance(u: Floats, v: Floats, half_length: float, bend: float, half_width: float) -> Floats:
    """Return the distance of a tapered stroke along the parabola `v = bend (u / half_length)^2`.

    `u` is 0 in the middle of the chord; `half_width` is half the width of the stroke there.
    """
    share = u * np.float32(1 / half_length)
    squared = share * share
    slope = share * np.float32(2 * bend / half_length)
    off = np.abs(v - squared * np.float32(bend)) / np.sqrt(1 + slope * slope)
    past = np.maximum(np.abs(u) - np.float32(half_length), 0)
    return off + past - np.float32(half_width) * (1 - np.minimum(squared, 1) * np.float32(0.8))


def smoothstep(value: float) -> float:
    """Return 0 below 0, 1 above 1 and `3 x^2 - 2 x^3` between."""
    x = min(max(value, 0.0), 1.0)
    return x * x * (3 - 2 * x)


def soft_noise(rng: np.random.Generator, shape: tuple[int, int], cells: int) -> Floats:
    """Return slowly varying noise `[H, W]`: standard normal values on a `cells` x `cells` grid, linear in between."""
    grid = rng.standard_normal((cells + 1, cells + 1), dtype=np.float32)
    row, row_share = _between(shape[0], cells)
    col, col_share = _between(shape[1], cells)
    rows = grid[row] + (grid[row + 1] - grid[row]) * row_share[:, None]
    return rows[:, col] + (rows[:, col + 1] - rows[:, col]) * col_share


def _between(size: int, cells: int) -> tuple[NDArray[np.intp], Floats]:
    """Return the lower grid index and the share of the way to the next one, for each of `size` pixels."""
    place = np.arange(size, dtype=np.float32) * np.float32(cells / size)
    low = place.astype(np.intp)
    return low, place - low.astype(np.float32)


def to_bytes(image: Floats) -> NDArray[np.uint8]:
    """Return an image in [0, 1] as uint8, rounded to the nearest level."""
    return (clipped(image) * np.float32(255) + np.float32(0.5)).astype(np.uint8)
