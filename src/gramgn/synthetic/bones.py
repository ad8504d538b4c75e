"""Bones of a growing hand, added one by one to a layer of density."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from gramgn.synthetic.anatomy import (
    CARPALS,
    FOREARM,
    GROWTH,
    GROWTH_PLATE,
    JOINT_SPACE,
    RAYS,
    Carpal,
    Growth,
    Ray,
)
from gramgn.synthetic.shapes import (
    Floats,
    Point,
    axes,
    box_distance,
    clipped,
    coverage,
    smoothstep,
    unit,
    window,
)

WAIST = {"metacarpal": 0.50, "proximal": 0.54, "middle": 0.58, "distal": 0.56}


@dataclass(frozen=True)
class Hand:
    """One child's hand and where it lies in the picture.

    Attributes:
        age: Bone age in years.
        sex: Index into the (boys, girls) pairs of the anatomy.
        origin: The wrist in pixels, (x, y).
        scale: Pixels per hand unit.
        angle: Rotation in radians, clockwise.
        spread: Factor on the angles between the fingers.
        softness: Width of an edge in pixels.
        bend: Added angle of each ray in degrees.
    """

    age: float
    sex: int
    origin: Point
    scale: float
    angle: float
    spread: float
    softness: float
    bend: dict[str, float] = field(default_factory=dict)

    def place(self, x: float, y: float) -> Point:
        """Return the pixel coordinates of a point in hand units."""
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return (
            self.origin[0] + self.scale * (x * cos + y * sin),
            self.origin[1] + self.scale * (x * sin - y * cos),
        )


def joints(ray: Ray, hand: Hand, name: str) -> list[tuple[float, float]]:
    """Return the joints of a ray in hand units, from the wrist to the tip of its last bone."""
    x, y = ray.base
    tilt = ray.tilt * hand.spread + hand.bend.get(name, 0.0)
    points = [(x, y)]
    for index, length in enumerate(ray.lengths):
        angle = math.radians(tilt + (ray.spread if index else 0.0))
        x, y = x + length * math.sin(angle), y + length * math.cos(angle)
        points.append((x, y))
    return points


def draw_bones(layer: Floats, hand: Hand, rng: np.random.Generator) -> None:
    """Add all bones that have ossified to `layer`.

    Args:
        layer: Bone density `[H, W]` in [0, 1], changed in place.
        hand: The hand to draw.
        rng: Source of each bone's own variation (maturation and shape).
    """
    infancy = 1.12 - 0.12 * min(1.0, hand.age / 6)
    for name, (end, half_end, half_shaft) in FOREARM.items():
        half = half_end * _log_normal(rng, 0.03) * hand.scale
        ends = (hand.place(end[0] * 1.05, end[1] - 1.40), hand.place(*end))
        _draw_tubular(layer, hand, rng, ends, (half, half), half_shaft / half_end, GROWTH[name], False)
    for name, ray in RAYS.items():
        points = [hand.place(x, y) for x, y in joints(ray, hand, name)]
        # The thumb has no middle phalanx.
        kinds = ("metacarpal", "proximal", *(("middle",) if len(points) > 4 else ()), "distal")
        for index, kind in enumerate(kinds):
            half = ray.half_widths[index] * hand.scale * infancy * _log_normal(rng, 0.04)
            halves = (half, half * (0.88 if index else 1.0))
            ends = (points[index], points[index + 1])
            at_start = index > 0 or name == "thumb"
            _draw_tubular(layer, hand, rng, ends, halves, WAIST[kind], GROWTH[kind], at_start)
    for carpal in CARPALS.values():
        _draw_carpal(layer, hand, carpal, rng)


def _log_normal(rng: np.random.Generator, sigma: float) -> float:
    return math.exp(sigma * float(rng.standard_normal()))


def _draw_carpal(layer: Floats, hand: Hand, carpal: Carpal, rng: np.random.Generator) -> None:
    """Add a wrist bone: a kernel that grows for seven and a half years and gains corners."""
    onset = carpal.onset[hand.sex] * _log_normal(rng, 0.10)
    size = hand.scale * _log_normal(rng, 0.05)
    tilt = math.radians(carpal.tilt + 6 * float(rng.standard_normal()))
    shift_x, shift_y = (0.004 * float(step) for step in rng.standard_normal(2))
    if hand.age <= onset:
        return
    grown = min(1.0, (hand.age - onset) / 7.5)
    size *= 0.30 + 0.70 * grown**0.55
    half_u, half_v = carpal.half_long * size, carpal.half_short * size
    centre = hand.place(carpal.x + shift_x, carpal.y + shift_y)
    direction = (math.sin(hand.angle + tilt), -math.cos(hand.angle + tilt))
    corner = half_v * (1.0 - 0.35 * grown)
    _draw_block(layer, hand, centre, direction, (half_u, half_v, corner), cortex=0.22 * half_v, core=0.68)


def _draw_block(
    layer: Floats,
    hand: Hand,
    centre: Point,
    direction: Point,
    size: tuple[float, float, float],
    *,
    cortex: float,
    core: float,
) -> None:
    """Add a rounded box of bone; `size` is half its length, half its width and the radius of its corners."""
    half_u, half_v, corner = size
    win = window(layer.shape, centre, centre, math.hypot(half_u, half_v) + hand.softness)
    u, v = axes(win, centre, direction)
    across, along = np.abs(v) - np.float32(half_v), np.abs(u) - np.float32(half_u)
    _add(win.of(layer), box_distance(across, along, corner), hand.softness, cortex=cortex, core=core)


def _draw_tubular(
    layer: Floats,
    hand: Hand,
    rng: np.random.Generator,
    ends: tuple[Point, Point],
    halves: tuple[float, float],
    waist: float,
    growth: Growth,
    at_start: bool,
) -> None:
    """Add a shaft and its epiphysis, with a dark growth plate between them until they fuse.

    Args:
        layer: Bone density.
        hand: The hand to draw.
        rng: Source of the bone's variation.
        ends: Joints at both ends in pixels, the one nearer to the body first.
        halves: Half width at these ends, in pixels.
        waist: Narrowest width of the shaft as a share of the ends.
        growth: The epiphysis.
        at_start: Whether the epiphysis is at the first end.
    """
    onset = growth.onset[hand.sex] * _log_normal(rng, 0.10)
    fusion = growth.fusion[hand.sex] * _log_normal(rng, 0.03)
    start, (direction, length) = ends[0], unit(*ends)
    low, high = JOINT_SPACE * hand.scale / 2, length - JOINT_SPACE * hand.scale / 2
    thick = growth.thickness * hand.scale
    plate = GROWTH_PLATE * hand.scale * (1 - smoothstep((hand.age - fusion) / 2.0 + 0.5))
    if hand.age > onset:
        progress = min(1.0, max(0.0, (hand.age - onset) / (fusion - 2.0 - onset)))
        middle = low + thick / 2 if at_start else high - thick / 2
        half_u = thick / 2 * (0.45 + 0.55 * progress)
        half_v = halves[0 if at_start else 1] * (0.30 + 0.74 * progress)
        centre = (start[0] + middle * direction[0], start[1] + middle * direction[1])
        size = (half_u, half_v, 0.8 * min(half_u, half_v))
        _draw_block(layer, hand, centre, direction, size, cortex=0.5 * half_u, core=0.75)
    if at_start:
        low = low + thick + plate
    else:
        high = high - thick - plate
    # The shaft: flared ends, a waist, a bright cortex.
    win = window(layer.shape, *ends, max(halves) + 2 * hand.softness)
    u, v = axes(win, start, direction)
    half_length = max((high - low) / 2, 0.5)
    share = (u - np.float32((low + high) / 2)) * np.float32(1 / half_length)
    squared = np.minimum(share * share, np.float32(1.2))
    flare = squared * (np.float32(0.30) + np.float32(0.70) * squared)
    mean, tilt = (halves[1] + halves[0]) / 2, (halves[1] - halves[0]) / 2
    width = np.float32(mean) + np.clip(share, -1, 1) * np.float32(tilt)
    half = width * (np.float32(waist) + np.float32(1 - waist) * flare)
    d = box_distance(np.abs(v) - half, (np.abs(share) - 1) * np.float32(half_length), 0.35 * mean)
    thickness = 0.26 + 0.22 * min(1.0, hand.age / 16)
    _add(win.of(layer), d, hand.softness, cortex=thickness * mean * waist, core=0.60)


def _add(target: Floats, d: Floats, softness: float, *, cortex: float, core: float) -> None:
    """Lay a bone over the layer: full density at its surface, `core` deeper than `cortex`."""
    shell = clipped(1 + d * np.float32(1 / max(cortex, 0.7)))
    density = coverage(d, softness) * (np.float32(core) + np.float32(1 - core) * shell)
    target += density * (1 - target)
