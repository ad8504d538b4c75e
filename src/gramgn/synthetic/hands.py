"""A procedural hand radiograph: soft tissue, bones of the given age, the frame, the exposure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gramgn.synthetic.anatomy import RAYS
from gramgn.synthetic.bones import Hand, draw_bones, joints
from gramgn.synthetic.shapes import (
    Floats,
    Point,
    axes,
    box_distance,
    clipped,
    cone_distance,
    coverage,
    soft_noise,
    to_bytes,
    unit,
    whole,
    window,
)

LONG_SIDE = (160, 256)  # pixels, both included


def draw_hand(age_months: float, male: bool, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one radiograph.

    Neither the size of the picture nor the size of the hand in it depends on the age: as in the real set,
    the hand is framed to fill the picture, and the age shows in which bones have ossified and how far.

    Args:
        age_months: Bone age in months; it alone decides, with the sex, how mature the bones are.
        male: Boys mature later.
        rng: Source of everything else: frame, pose, each bone's variation, exposure, noise.

    Returns:
        Grey values `[H, W]`; the long side has 160 to 256 pixels.
    """
    # Mostly portrait, about one in eight landscape, as in the real set.
    long_side = int(rng.integers(LONG_SIDE[0], LONG_SIDE[1] + 1))
    short_side = round(long_side * rng.uniform(0.70, 0.86))
    shape = (short_side, long_side) if rng.random() < 0.12 else (long_side, short_side)
    hand = _pose(age_months / 12.0, male, shape, rng)
    tissue, bones = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    _draw_tissue(tissue, hand, rng)
    draw_bones(bones, hand, rng)
    return _expose(tissue, bones, hand, rng)


def _pose(age: float, male: bool, shape: tuple[int, int], rng: np.random.Generator) -> Hand:
    """Place the hand: it fills a random part of the frame, whatever its age."""
    height, width = shape
    wild = rng.random() < 0.15
    angle = math.radians((30 if wild else 7) * float(rng.standard_normal()))
    angle = max(-0.9, min(0.9, angle))
    bend = {name: 2.0 * float(rng.standard_normal()) for name in RAYS}
    sketch = Hand(age, 0 if male else 1, (0.0, 0.0), 1.0, angle, rng.uniform(0.75, 1.25), 1.0, bend)
    outline = [sketch.place(x, y) for x, y in ((-0.17, -0.28), (0.17, -0.28))]
    outline += [sketch.place(x, y) for name, ray in RAYS.items() for x, y in joints(ray, sketch, name)]
    (left, right), (top, bottom) = ((min(side), max(side)) for side in zip(*outline, strict=True))
    flesh = 0.07
    wide, tall = right - left + 2 * flesh, bottom - top + flesh
    scale = rng.uniform(0.66, 1.0) * min(width / wide, height / tall)
    origin = (
        (width - scale * wide) * rng.uniform(0.2, 0.8) - scale * (left - flesh),
        (height - scale * tall) * rng.uniform(0.2, 1.0) - scale * (top - flesh),
    )
    softness = rng.uniform(1.0, 1.9) * max(1.0, scale / 150)
    return replace(sketch, origin=origin, scale=scale, softness=softness)


def _draw_tissue(layer: Floats, hand: Hand, rng: np.random.Generator) -> None:
    """Lay fingers, palm and forearm into `layer` `[H, W]`; overlapping parts do not add up."""
    chubby = (1.16 - 0.16 * min(1.0, hand.age / 7)) * math.exp(0.05 * float(rng.standard_normal()))
    for name, ray in RAYS.items():
        points = joints(ray, hand, name)
        tip = hand.place(*points[-1])
        root, knuckle = hand.place(*points[0]), hand.place(*points[1])
        wide, narrow = (chubby * radius for radius in ray.flesh)
        _flesh(layer, hand, knuckle, tip, (wide, narrow), 0.80)
        _flesh(layer, hand, root, knuckle, (1.25 * wide, 1.12 * wide), 1.0)
    for start, end, radii in (
        ((0.0, -1.40), (0.0, -0.10), (0.23, 0.145)),
        ((0.0, -0.10), (0.01, 0.10), (0.145, 0.165)),
        ((0.01, 0.10), (0.025, 0.40), (0.165, 0.135)),
        ((0.11, 0.12), (0.13, 0.30), (0.095, 0.070)),
    ):
        wide, narrow = (radius * (0.45 + 0.55 * chubby) for radius in radii)
        _flesh(layer, hand, hand.place(*start), hand.place(*end), (wide, narrow), 1.0)


def _flesh(
    layer: Floats, hand: Hand, start: Point, end: Point, radii: tuple[float, float], thickness: float
) -> None:
    """Lay one tapered roll of flesh: thin at its edge, full a little way in."""
    radius0, radius1 = radii[0] * hand.scale, radii[1] * hand.scale
    win = window(layer.shape, start, end, max(radius0, radius1) + hand.softness)
    direction, length = unit(start, end)
    u, v = axes(win, start, direction)
    d = cone_distance(u, v, length, radius0, radius1)
    depth = clipped(d * np.float32(-1 / (0.055 * hand.scale)))
    density = coverage(d, hand.softness) * (np.float32(0.45) + np.float32(0.55) * depth * (2 - depth))
    target = win.of(layer)
    np.maximum(target, density * np.float32(thickness), out=target)


def _expose(tissue: Floats, bones: Floats, hand: Hand, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Turn densities into grey values and add what a real exposure adds."""
    shape = tissue.shape
    bright = rng.random() < 0.15
    field = rng.uniform(0.25, 0.55) if bright else rng.uniform(0.02, 0.14)
    soft, hard = rng.uniform(0.16, 0.34), rng.uniform(0.34, 0.60)
    if bright:
        soft, hard = 0.8 * soft, 0.8 * hard
    image = 1 - (1 - np.float32(soft) * tissue) * (1 - np.float32(hard) * bones)
    image *= 1 + np.float32(0.05) * soft_noise(rng, shape, 6)
    image = np.float32(field) + np.float32(1 - field) * image
    down, right = rng.uniform(-0.10, 0.10, size=2)
    slope = np.linspace(-1, 1, shape[0], dtype=np.float32)[:, None] * np.float32(down)
    image *= 1 + (slope + np.linspace(-1, 1, shape[1], dtype=np.float32)[None, :] * np.float32(right))
    if rng.random() < 0.80:
        _draw_marker(image, tissue, rng)
    if rng.random() < 0.40:
        _collimate(image, tissue, bright, rng)
    # A bent curve replaces the film's gamma: a parabola through (0, 0) and (1, 1).
    image = image + np.float32(rng.uniform(-0.35, 0.45)) * image * (1 - np.minimum(image, 1))
    image *= np.float32(rng.uniform(0.85, 1.10))
    image += np.float32(rng.uniform(0.004, 0.016)) * rng.standard_normal(shape, dtype=np.float32)
    return to_bytes(image)


def _draw_marker(image: Floats, tissue: Floats, rng: np.random.Generator) -> None:
    """Put a lead letter L with two initials on a faint plate, where the hand is not."""
    height, width = image.shape
    size = rng.uniform(0.045, 0.085) * max(height, width)
    angle = rng.uniform(-0.6, 0.6)
    places = rng.uniform((0.08, 0.10), (0.92, 0.75), size=(8, 2)) * (width, height)
    free = [at for at in places if not window(tissue.shape, at, at, 1.2 * size).of(tissue).any()]
    strength = np.float32(rng.uniform(0.75, 1.0))
    strokes = rng.uniform(-0.25, 0.25, size=(4, 2))
    if not free:
        return
    x, y = (float(value) for value in free[0])
    cos, sin = math.cos(angle), math.sin(angle)

    def at(right: float, down: float) -> Point:
        return x + size * (right * cos - down * sin), y + size * (right * sin + down * cos)

    win = window((height, width), (x, y), (x, y), 1.6 * size)
    target = win.of(image)
    u, v = axes(win, at(0, 0.15), (cos, sin))
    plate = box_distance(np.abs(v) - np.float32(0.95 * size), np.abs(u) - np.float32(0.6 * size), 0.1 * size)
    target += np.float32(0.06) * coverage(plate, 1.2)
    lines = [((-0.25, -0.55), (-0.25, 0.25)), ((-0.25, 0.25), (0.25, 0.25))]
    lines += [((-0.3 + 0.2 * i, 0.62 + a), (-0.25 + 0.2 * i, 0.62 + b)) for i, (a, b) in enumerate(strokes)]
    for index, (start, end) in enumerate(lines):
        direction, length = unit(at(*start), at(*end))
        u, v = axes(win, at(*start), direction)
        half = (0.085 if index < 2 else 0.045) * size
        ink = coverage(cone_distance(u, v, length, half, half), 1.0)
        target += ink * (strength - target)


def _collimate(image: Floats, tissue: Floats, bright: bool, rng: np.random.Generator) -> None:
    """Shade what lies outside a slightly tilted rectangle around the hand, and draw the rectangle's edge."""
    height, width = image.shape
    ys, xs = np.nonzero(tissue[: int(0.97 * height)])
    if ys.size == 0:
        return
    pad = rng.uniform(0.02, 0.07, size=4) * max(height, width)
    left, right = float(xs.min()) - pad[0], float(xs.max()) + pad[1]
    top, bottom = float(ys.min()) - pad[2], height - 1 - 0.3 * pad[3]
    angle = math.radians(4 * float(rng.standard_normal()))
    win = whole((height, width))
    u, v = axes(win, ((left + right) / 2, (top + bottom) / 2), (math.cos(angle), math.sin(angle)))
    along = np.abs(u) - np.float32((right - left) / 2)
    d = box_distance(along, np.abs(v) - np.float32((bottom - top) / 2), 0.5)
    outside = rng.uniform(0.2, 0.5) if bright and rng.random() < 0.6 else rng.uniform(0.0, 0.06)
    inside = coverage(d, rng.uniform(1.5, 5.0))
    image += (1 - inside) * (np.float32(outside) - image)
    image += np.float32(rng.uniform(0.0, 0.35)) * coverage(np.abs(d) - np.float32(0.6), 1.2)
