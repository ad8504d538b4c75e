"""The hand's skeleton as plain data: where the bones lie, when they ossify, when their growth plates close.

Times, in years (boys, girls):

* Carpal onset: eorif.com/wrist-anatomy-bones; cross-checked with Radiopaedia, "Ossification centers of the
  wrist" (capitate 1-3 months, hamate 2-4 months, triquetrum 2-3 y, lunate 2-4 y, scaphoid, trapezium and
  trapezoid 4-6 y, pisiform 8-12 y; distal radius 1 y, distal ulna 5-6 y) and with the order in Gilsanz &
  Ratib, "Hand Bone Age".
* Epiphyses: Gilsanz & Ratib (girls 10 months to 2 years, boys 14 months to 3 years, in the order proximal
  phalanges, metacarpals, middle, distal; the radius before the triquetrum, the ulna before the pisiform).
* Fusion: Radiopaedia, "Ossification centers of the hand" (metacarpals and phalanges 14-19 y), and fpnotebook,
  "Hand and wrist ossification centers" (distal radius 16-17 y). That the distal phalanges close first and the
  forearm last is general knowledge, not checked against a text.

Shapes and places are drawn by eye after radiographs; the proportions of the tubular bones are only in
keeping with the standards of Garn et al. 1972 (Radiology 105:375), not taken from them.

Lengths are in hand units: 1 is about the distance from the end of the radius to the tip of the middle finger.
The hand is a left one seen from the back: x grows towards the thumb, y towards the finger tips,
and the origin is the middle of the wrist. Angles are in degrees from +y towards the thumb.
"""

from __future__ import annotations

from typing import NamedTuple

BySex = tuple[float, float]


class Carpal(NamedTuple):
    """One bone of the wrist."""

    onset: BySex  # age in years at which it begins to ossify
    x: float
    y: float
    half_long: float  # when mature
    half_short: float
    tilt: float  # of the long axis


class Growth(NamedTuple):
    """An epiphysis: the bony end of a tubular bone beyond its growth plate."""

    onset: BySex  # age in years at which it appears
    fusion: BySex  # age in years at which half of the growth plate is closed
    thickness: float  # along the bone, when mature


class Ray(NamedTuple):
    """A metacarpal and the phalanges that follow it."""

    base: tuple[float, float]  # where the metacarpal begins, (x, y)
    tilt: float  # of the metacarpal
    spread: float  # further angle of the finger relative to the metacarpal
    lengths: tuple[float, ...]  # joint to joint: metacarpal, proximal, (middle,) distal
    half_widths: tuple[float, ...]  # of the same bones at their ends
    flesh: tuple[float, float]  # radius of the finger's soft tissue at its root and at its tip


CARPALS: dict[str, Carpal] = {
    "capitate": Carpal((0.25, 0.17), 0.012, 0.112, 0.049, 0.033, 4),
    "hamate": Carpal((0.33, 0.25), -0.053, 0.118, 0.041, 0.035, -22),
    "triquetrum": Carpal((2.0, 1.5), -0.082, 0.066, 0.033, 0.027, -50),
    "lunate": Carpal((4.0, 2.5), -0.006, 0.043, 0.036, 0.031, 70),
    "scaphoid": Carpal((5.5, 4.0), 0.074, 0.054, 0.047, 0.028, 50),
    "trapezium": Carpal((6.0, 4.0), 0.121, 0.104, 0.035, 0.028, 60),
    "trapezoid": Carpal((6.0, 4.0), 0.072, 0.121, 0.027, 0.025, 10),
    "pisiform": Carpal((11.0, 9.5), -0.103, 0.056, 0.021, 0.018, 0),
}

GROWTH: dict[str, Growth] = {
    "radius": Growth((1.1, 0.9), (18.0, 16.5), 0.038),
    "ulna": Growth((6.0, 5.5), (18.0, 16.5), 0.030),
    "metacarpal": Growth((1.8, 1.2), (16.5, 14.7), 0.032),
    "proximal": Growth((1.4, 0.9), (16.4, 14.5), 0.024),
    "middle": Growth((2.0, 1.3), (16.3, 14.6), 0.020),
    "distal": Growth((2.3, 1.5), (15.7, 14.0), 0.018),
}

RAYS: dict[str, Ray] = {
    "thumb": Ray((0.142, 0.132), 43, -12, (0.245, 0.170, 0.135), (0.036, 0.031, 0.024), (0.068, 0.052)),
    "index": Ray(
        (0.076, 0.158), 12, 1, (0.355, 0.212, 0.128, 0.098), (0.036, 0.030, 0.026, 0.019), (0.062, 0.043)
    ),
    "middle": Ray(
        (0.017, 0.168), 1, 0, (0.345, 0.236, 0.150, 0.102), (0.035, 0.031, 0.027, 0.020), (0.063, 0.044)
    ),
    "ring": Ray(
        (-0.040, 0.163), -10, -1, (0.308, 0.216, 0.142, 0.102), (0.032, 0.029, 0.026, 0.019), (0.061, 0.043)
    ),
    "little": Ray(
        (-0.088, 0.148), -21, -3, (0.282, 0.170, 0.104, 0.090), (0.031, 0.027, 0.023, 0.017), (0.055, 0.038)
    ),
}

# Forearm bones: distal end (x, y), half width there and half width of the shaft.
FOREARM: dict[str, tuple[tuple[float, float], float, float]] = {
    "radius": ((0.048, 0.002), 0.086, 0.046),
    "ulna": ((-0.092, -0.008), 0.044, 0.032),
}

GROWTH_PLATE = 0.020  # width of an open growth plate
JOINT_SPACE = 0.010  # cartilage between two bones of a mature hand
