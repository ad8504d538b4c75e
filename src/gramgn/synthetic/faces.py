"""Procedural cartoon faces of adults from 18 to 39: the traits of a person, and one photo of them.

The signs of ageing between 18 and 39 follow two reviews; the amounts are ours:

* PMC6771603: first signs between 20 and 30; sagging, deeper nasolabial folds, smaller visible eyes, thinner
  lips, a longer nose.
* Veleminska et al. 2022, Sci Rep, doi 10.1038/s41598-022-26376-8: the same list; male faces grow until
  almost 30.

No photo of anybody was used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gramgn.synthetic.shapes import coverage, ellipse_distance, soft_noise, to_bytes, whole
from gramgn.synthetic.sketch import Colour, Sketch

SIDE = (60, 200)  # pixels, both included
YOUNGEST, OLDEST = 18, 39


@dataclass(frozen=True)
class Person:
    """What all photos of a person share."""

    t: float  # apparent age: 0 at 18 years, 1 at 39; may lie a little outside
    male: bool
    skin: Colour
    hair: Colour
    cloth: Colour
    long_hair: bool  # it falls along the face
    fringe: float  # its length, 0 for none
    width: float  # factor on the width of the face
    height: float
    eye_gap: float  # distance of an eye from the middle
    eye_tilt: float  # in degrees
    brow: float  # thickness
    mouth: float  # half width
    beard: float  # darkness of a shaven beard
    lines: tuple[
        float, float, float, float
    ]  # contrast of nasolabial folds, crow's feet, forehead lines, eye bags


def make_person(apparent_age: float, male: bool, rng: np.random.Generator) -> Person:
    """Draw somebody's lasting traits.

    Args:
        apparent_age: How old the person looks, in years; what is drawn depends on this, the label does not.
        male: Sex.
        rng: The person's own source.
    """
    tone, warm = rng.uniform(0.70, 1.04), rng.uniform(-0.02, 0.02)
    dark, brown = rng.uniform(0.05, 0.22), rng.uniform(0.0, 0.10)
    red, green, blue = (float(value) for value in rng.uniform(0.08, 0.92, size=3))
    folds, feet, forehead, bags = (float(value) for value in rng.uniform(0.5, 1.5, size=4))
    return Person(
        t=(apparent_age - YOUNGEST) / (OLDEST - YOUNGEST),
        male=male,
        skin=(min(0.97, 0.93 * tone + 0.02), (0.76 + warm) * tone, (0.62 + 1.5 * warm) * tone),
        hair=(dark + brown, dark + 0.5 * brown, dark),
        cloth=(red, green, blue),
        long_hair=bool(rng.random() < (0.06 if male else 0.72)),
        fringe=float(rng.uniform(0.05, 0.26)) if rng.random() < (0.25 if male else 0.40) else 0.0,
        width=float(rng.uniform(0.93, 1.07)) * (1.03 if male else 0.98),
        height=float(rng.uniform(0.95, 1.05)),
        eye_gap=float(rng.uniform(0.225, 0.265)),
        eye_tilt=float(rng.uniform(-6, 3)),
        brow=float(rng.uniform(0.018, 0.032)) * (1.25 if male else 0.85),
        mouth=float(rng.uniform(0.17, 0.23)),
        beard=float(rng.uniform(0.0, 0.22)) if male else 0.0,
        lines=(folds, feet, forehead, bags),
    )


def draw_face(person: Person, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Take one photo of a person.

    The size of the picture and of the face in it depend on nothing but `rng`.

    Args:
        person: Who is on it.
        rng: Source of everything that differs between two photos: size, pose, expression, background, light,
            noise.

    Returns:
        A square RGB picture `[side, side, 3]` with a side of 60 to 200 pixels.
    """
    side = int(rng.integers(SIDE[0], SIDE[1] + 1))
    image = np.empty((3, side, side), np.float32)
    back = (rng.uniform(0.15, 0.85) + rng.uniform(-0.2, 0.2, size=(3, 1, 1))).astype(np.float32)
    image[:] = back * (1 + np.float32(0.18) * soft_noise(rng, (side, side), 4))
    scale = side / 2 * rng.uniform(0.92, 1.12)
    origin = (side / 2 * (1 + rng.uniform(-0.07, 0.07)), side / 2 * (1.04 + rng.uniform(-0.07, 0.07)))
    angle = float(rng.uniform(-0.105, 0.105))
    softness = rng.uniform(1.0, 1.9) * max(1.0, side / 110)
    sketch = Sketch(image, origin, scale, angle, softness)
    turn = float(rng.uniform(-0.06, 0.06))
    smile = float(rng.uniform(-0.02, 0.05))
    _draw_head(sketch, person, turn)
    _draw_features(sketch, person, turn, smile)
    _draw_lines(sketch, person, turn, smile)
    _draw_hair(sketch, person, turn)
    if rng.random() < 0.18:
        _draw_glasses(sketch, person, turn, float(rng.uniform(0.1, 0.5)))
    return _develop(sketch, rng)


def _tint(colour: Colour, factor: float) -> Colour:
    """Return a darker (factor below 1) or lighter colour."""
    red, green, blue = (min(1.0, channel * factor) for channel in colour)
    return red, green, blue


def _draw_head(sketch: Sketch, person: Person, turn: float) -> None:
    """Paint hair behind the head, shoulders, neck, ears and the face's outline."""
    wide, high = person.width, person.height
    # The jaw widens with age as the cheeks sag.
    jaw = (0.43 + 0.05 * person.t + (0.02 if person.male else 0.0)) * wide
    if person.long_hair:
        sketch.box(0, 0.15, 0.66 * wide, 0.95, 0.5, person.hair)
    sketch.ellipse(0, 1.42, 1.0, 0.62, person.cloth)
    sketch.box(0, 0.85, 0.26 * wide, 0.32, 0.1, _tint(person.skin, 0.80))
    if not person.long_hair:
        for side in (-1, 1):
            sketch.ellipse(side * 0.585 * wide - 0.3 * turn, 0.02, 0.075, 0.15, _tint(person.skin, 0.90))
    sketch.ellipse(0, -0.12 * high, 0.575 * wide, 0.66 * high, person.skin)
    sketch.ellipse(0, 0.30 * high, jaw, 0.47 * high, person.skin)
    sketch.ellipse(0, 0.10 * high, 0.545 * wide, 0.46 * high, person.skin)
    if person.beard:
        grey = (0.25, 0.25, 0.28)
        sketch.ellipse(0, 0.50 * high, 0.80 * jaw, 0.30 * high, grey, strength=person.beard, blur=8)
    for side in (-1, 1):
        sketch.ellipse(side * 0.30 * wide + turn, 0.22, 0.14, 0.10, (0.88, 0.48, 0.42), strength=0.16, blur=7)


def _draw_features(sketch: Sketch, person: Person, turn: float, smile: float) -> None:
    """Paint eyes, brows, nose and mouth."""
    t, x0 = min(max(person.t, -0.5), 1.5), turn
    opening = 0.085 - 0.022 * t
    for side in (-1, 1):
        _draw_eye(sketch, person, x0 + side * person.eye_gap * person.width, opening, side)
    length = 0.30 + 0.035 * t
    tip = -0.08 + length
    shade = _tint(person.skin, 0.72)
    sketch.stroke(x0 * 1.5 + 0.055, -0.08 + 0.5 * length, 0.42 * length, 0.02, 0.014, dark=0.14, tilt=83)
    sketch.ellipse(x0 * 1.6, tip - 0.04, 0.075, 0.055, _tint(person.skin, 1.06), strength=0.6, blur=3)
    sketch.stroke(x0 * 1.6, tip + 0.012, 0.085, -0.022, 0.013, dark=0.30)
    for side in (-1, 1):
        sketch.ellipse(x0 * 1.6 + side * 0.045, tip + 0.008, 0.022, 0.012, _tint(shade, 0.6), strength=0.8)
    lip = 0.060 - 0.016 * t
    lips = (0.72, 0.36, 0.36) if person.male else (0.78, 0.28, 0.32)
    y = 0.46 * person.height
    sketch.ellipse(x0, y - 0.35 * lip, person.mouth * 0.86, 0.62 * lip, _tint(lips, 0.90), strength=0.75)
    sketch.ellipse(x0, y + 0.55 * lip, person.mouth * 0.76, 0.80 * lip, lips, strength=0.75)
    sketch.stroke(x0, y, person.mouth, -smile, 0.012, dark=0.65)
    sketch.stroke(x0, y + 2.1 * lip, 0.10, 0.015, 0.016, dark=0.10)


def _draw_eye(sketch: Sketch, person: Person, x: float, opening: float, side: int) -> None:
    """Paint one eye, its lid and its brow; `side` is -1 for the picture's left."""
    y, half_x, half_y = -0.06, 0.115, 0.62 * opening
    tilt = side * person.eye_tilt
    scale = sketch.scale

    def white(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return ellipse_distance(u, v, half_x * scale, half_y * scale)

    sketch.ellipse(x, y, 0.15, 0.10, _tint(person.skin, 0.84), strength=0.55, blur=5)
    sketch.ellipse(x, y, half_x, half_y, (0.93, 0.92, 0.90), tilt=tilt)
    sketch.ellipse(x, y, 0.056, 0.056, (0.24, 0.15, 0.10), tilt=tilt, clip=white)
    sketch.ellipse(x, y, 0.024, 0.024, (0.03, 0.03, 0.03), tilt=tilt, clip=white)
    sketch.ellipse(x + 0.018, y - 0.018, 0.010, 0.010, (1.0, 1.0, 1.0), strength=0.8)
    # The lid's arc follows the upper edge of the white.
    sketch.stroke(
        x, y - half_y, half_x * 1.05, half_y, 0.013, dark=0.80, tilt=tilt, colour=(0.10, 0.07, 0.06)
    )
    sketch.stroke(x, y - half_y - 0.035, half_x, half_y, 0.008, dark=0.20, tilt=tilt)
    sketch.stroke(
        x + side * 0.01, -0.215, 0.145, 0.035, person.brow, dark=0.85, tilt=0.6 * tilt, colour=person.hair
    )


def _draw_lines(sketch: Sketch, person: Person, turn: float, smile: float) -> None:
    """Darken folds and lines; their contrast is the strongest sign of age."""
    t = person.t
    folds, feet, forehead, bags = person.lines
    fold = folds * (0.02 + 0.22 * max(0.0, t)) + 0.75 * max(0.0, smile)
    nose = -0.08 + 0.30 + 0.035 * t
    for side in (-1, 1):
        x = turn + side * 0.175
        sketch.stroke(x + side * 0.03, nose + 0.14, 0.16, side * 0.03, 0.018, dark=fold, tilt=90 - side * 24)
        eye = turn + side * person.eye_gap * person.width
        bag = bags * (0.04 + 0.16 * max(0.0, t))
        sketch.stroke(eye, 0.045, 0.115, -0.035, 0.016, dark=bag)
        for index, angle in enumerate((-24, 0, 24)):
            dark = feet * 0.20 * max(0.0, t - 0.25)
            y = -0.06 + 0.045 * (index - 1)
            sketch.stroke(eye + side * 0.185, y, 0.055, 0.004, 0.009, dark=1.6 * dark, tilt=side * angle)
    for index in range(3):
        dark = 1.5 * forehead * 0.13 * max(0.0, t - 0.15)
        sketch.stroke(turn, -0.36 - 0.075 * index, 0.26 - 0.03 * index, 0.018, 0.010, dark=dark)


def _draw_hair(sketch: Sketch, person: Person, turn: float) -> None:
    """Paint the hair above a hairline that recedes with age, more in men, and a fringe."""
    win, u, v = sketch.local(0, -0.30, 1.0)
    scale, wide, high = sketch.scale, person.width, person.height
    head = ellipse_distance(u, v - np.float32(0.14 * scale), 0.635 * wide * scale, 0.73 * high * scale)
    recession = 0.03 * max(person.t, -0.3) * (1.3 if person.male else 1.0)
    edge = -0.52 * high - recession + person.fringe + 0.30
    share = (u - np.float32(turn * scale)) * np.float32(1 / (0.58 * wide * scale))
    drop = 0.42 if person.long_hair else 0.30
    line = np.float32(edge * scale) + np.float32(drop * scale) * share * share * np.minimum(
        share * share, 1.6
    )
    cover = np.minimum(coverage(head, sketch.softness), coverage(v - line, 1.4 * sketch.softness))
    sketch.paint(win, cover, person.hair)
    sketch.ellipse(-0.15, -0.66 * high, 0.22, 0.06, _tint(person.hair, 1.9), strength=0.35, tilt=-14, blur=6)


def _draw_glasses(sketch: Sketch, person: Person, turn: float, dark: float) -> None:
    """Draw two rims and a bridge."""
    for side in (-1, 1):
        win, u, v = sketch.local(turn + side * person.eye_gap * person.width, -0.05, 0.28)
        d = ellipse_distance(u, v, 0.19 * sketch.scale, 0.14 * sketch.scale)
        rim = coverage(np.abs(d) - np.float32(0.012 * sketch.scale), sketch.softness)
        sketch.paint(win, rim, (0.12, 0.11, 0.12), 0.4 + dark)
    sketch.stroke(turn, -0.07, 0.06, 0.012, 0.012, dark=0.4 + dark, colour=(0.12, 0.11, 0.12))


def _develop(sketch: Sketch, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Add light from one side, white balance, gain and noise."""
    image, (height, width) = sketch.image, sketch.image.shape[1:]
    win = whole((height, width))
    across, down = rng.uniform(-0.22, 0.22), rng.uniform(-0.10, 0.06)
    light = np.float32(across / width) * (2 * win.x - width) + np.float32(down / height) * (
        2 * win.y - height
    )
    image *= 1 + light
    balance = rng.uniform(0.93, 1.07, size=(3, 1, 1)) * rng.uniform(0.78, 1.12)
    image *= balance.astype(np.float32)
    strength = np.float32(rng.uniform(0.004, 0.022))
    image += strength * rng.standard_normal((height, width), dtype=np.float32)
    return np.ascontiguousarray(to_bytes(image).transpose(1, 2, 0))
