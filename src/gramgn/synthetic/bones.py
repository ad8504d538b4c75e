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
PHALANGES = ("proximal", "middle", "distal")


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


@dataclass(frozen=True)
class Tubular:
    """A tubular bone between two joints.

    Attributes:
        start: End that lies nearer to the body, in pixels.
        end: Other end.
        half_start: Half width at `start`, in pixels.
        half_end: Half width at `end`, in pixels.
        waist: Narrowest width of the shaft as a share of the ends.
        growth: The epiphysis.
        at_start: Whether the epiphysis is at `start`.
    """

    start: Point
    end: Point
    half_start: float
    half_end: float
    waist: float
    growth: Growth
    at_start: bool


@dataclass(frozen=True)
class Block:
    """A short bone: a rounded box.

    Attributes:
        centre: Its middle in pixels.
        direction: Unit direction of `u`.
        half_u: Half its length along `u`, in pixels.
        half_v: Half its width, in pixels.
        corner: Radius of its corners, in pixels.
    """

    centre: Point
    direction: Point
    half_u: float
    half_v: float
    corner: float


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
        jitter = _log_normal(rng, 0.03)
        below = (end[0] * 1.05, end[1] - 1.40)
        half = half_end * jitter * hand.scale
        bone = Tubular(
            hand.place(*below),
            hand.place(*end),
            half,
            half,
            half_shaft / half_end,
            GROWTH[name],
            at_start=False,
        )
        _draw_tubular(layer, hand, bone, rng)
    for name, ray in RAYS.items():
        points = [hand.place(x, y) for x, y in joints(ray, hand, name)]
        for index in range(len(points) - 1):
            kind = _kind(index, len(points) - 1)
            half = ray.half_widths[index] * hand.scale * infancy * _log_normal(rng, 0.04)
            at_start = index > 0 or name == "thumb"
            ends = (half, half * (0.88 if index else 1.0))
            bone = Tubular(
                points[index],
                points[index + 1],
                *ends,
                WAIST[kind],
                GROWTH[kind],
                at_start,
            )
            _draw_tubular(layer, hand, bone, rng)
    for carpal in CARPALS.values():
        _draw_carpal(layer, hand, carpal, rng)


def _kind(index: int, num_bones: int) -> str:
    """Return the growth table's name of the `index`-th bone of a ray; the thumb has no middle phalanx."""
    if index == 0:
        return "metacarpal"
    return "distal" if index == num_bones - 1 else PHALANGES[index - 1]


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
    angle = hand.angle + tilt
    block = Block(centre, (math.sin(angle), -math.cos(angle)), half_u, half_v, half_v * (1.0 - 0.35 * grown))
    _draw_block(layer, block, hand.softness, cortex=0.22 * half_v, core=0.68)


def _draw_block(layer: Floats, block: Block, softness: float, *, cortex: float, core: float) -> None:
    """Add a block of bone."""
    win = window(layer.shape, block.centre, block.centre, math.hypot(block.half_u, block.half_v) + softness)
    if win is None:
        return
    u, v = axes(win, block.centre, block.direction)
    across, along = np.abs(v) - np.float32(block.half_v), np.abs(u) - np.float32(block.half_u)
    _add(win.of(layer), box_distance(across, along, block.corner), softness, cortex=cortex, core=core)


def _draw_tubular(layer: Floats, hand: Hand, bone: Tubular, rng: np.random.Generator) -> None:
    """Add a shaft and its epiphysis, with a dark growth plate between them until they fuse."""
    progress, fused, seen = _growth(bone.growth, hand, rng)
    direction, length = unit(bone.start, bone.end)
    gap = JOINT_SPACE * hand.scale / 2
    low, high = gap, length - gap
    thick = bone.growth.thickness * hand.scale
    plate = GROWTH_PLATE * hand.scale * (1 - fused)
    middle = low + thick / 2 if bone.at_start else high - thick / 2
    if seen:
        half_u = thick / 2 * (0.45 + 0.55 * progress)
        half_v = (bone.half_start if bone.at_start else bone.half_end) * (0.30 + 0.74 * progress)
        centre = (bone.start[0] + middle * direction[0], bone.start[1] + middle * direction[1])
        block = Block(centre, direction, half_u, half_v, 0.8 * min(half_u, half_v))
        _draw_block(layer, block, hand.softness, cortex=0.5 * half_u, core=0.75)
    span = (low + thick + plate, high) if bone.at_start else (low, high - thick - plate)
    _draw_shaft(layer, span, bone, hand)


def _growth(growth: Growth, hand: Hand, rng: np.random.Generator) -> tuple[float, float, bool]:
    """Return how wide the epiphysis is, how far its plate has closed (shares), and whether it is there."""
    late, slow = _log_normal(rng, 0.10), _log_normal(rng, 0.03)
    onset, fusion = growth.onset[hand.sex] * late, growth.fusion[hand.sex] * slow
    progress = min(1.0, max(0.0, (hand.age - onset) / (fusion - 2.0 - onset)))
    return progress, smoothstep((hand.age - fusion) / 2.0 + 0.5), hand.age > onset


def _draw_shaft(layer: Floats, span: tuple[float, float], bone: Tubular, hand: Hand) -> None:
    """Add the shaft from `span[0]` to `span[1]` along the axis: flared ends, a waist, a bright cortex."""
    reach = max(bone.half_start, bone.half_end) + 2 * hand.softness
    win = window(layer.shape, bone.start, bone.end, reach)
    if win is None:
        return
    u, v = axes(win, bone.start, unit(bone.start, bone.end)[0])
    half_length = max((span[1] - span[0]) / 2, 0.5)
    share = (u - np.float32((span[0] + span[1]) / 2)) * np.float32(1 / half_length)
    squared = np.minimum(share * share, np.float32(1.2))
    flare = squared * (np.float32(0.30) + np.float32(0.70) * squared)
    mean, tilt = (bone.half_end + bone.half_start) / 2, (bone.half_end - bone.half_start) / 2
    ends = np.float32(mean) + np.clip(share, -1, 1) * np.float32(tilt)
    half = ends * (np.float32(bone.waist) + np.float32(1 - bone.waist) * flare)
    d = box_distance(np.abs(v) - half, (np.abs(share) - 1) * np.float32(half_length), 0.35 * mean)
    thickness = 0.26 + 0.22 * min(1.0, hand.age / 16)
    _add(win.of(layer), d, hand.softness, cortex=thickness * mean * bone.waist, core=0.60)


def _add(target: Floats, d: Floats, softness: float, *, cortex: float, core: float) -> None:
    """Lay a bone over what is there: full density at its surface, `core` deeper than `cortex`."""
    shell = clipped(1 + d * np.float32(1 / max(cortex, 0.7)))
    density = coverage(d, softness) * (np.float32(core) + np.float32(1 - core) * shell)
    target += density * (1 - target)
