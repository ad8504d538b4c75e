"""A curve in plain characters, for terminals, pipes and logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MARKS = "*o+x"
LOG_FROM = 10.0
"""Largest over smallest value from which the axis is logarithmic."""

Points = Sequence[tuple[float, float]]


def chart(series: Mapping[str, Points], *, width: int, height: int = 10) -> list[str]:
    """Draw curves over a common x axis; later curves are drawn over earlier ones.

    Args:
        series: Points ``(x, y)`` by name; values that are not finite are left out.
        width: Longest line, in characters.
        height: Lines of the plane.

    Returns:
        The lines; none if there is no finite value.
    """
    kept = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return []
    xs, ys = (sorted({point[axis] for points in kept.values() for point in points}) for axis in (0, 1))
    is_log = ys[0] > 0 and ys[-1] / ys[0] >= LOG_FROM
    rows = [""] * height
    rows[0], rows[-1] = f"{ys[-1]:.3g}", f"{ys[0]:.3g}"
    margin = max(map(len, rows))
    plane = [[" "] * (width - margin - 2) for _ in range(height)]
    for mark, points in zip(MARKS, kept.values(), strict=False):
        for x, y in points:
            level = _share(y, ys[0], ys[-1], is_log)
            column = _share(x, xs[0], xs[-1], False)
            plane[round((1 - level) * (height - 1))][round(column * (len(plane[0]) - 1))] = mark
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, kept, strict=False))
    lines = [f"{'':{margin}}  {legend}{'   (log axis)' if is_log else ''}"]
    lines += [f"{label:>{margin}} |{''.join(row)}" for label, row in zip(rows, plane, strict=True)]
    lines.append(f"{'':{margin}} +{'-' * len(plane[0])}")
    first, last = f"{xs[0]:g}", f"{xs[-1]:g}" if xs[-1] != xs[0] else ""
    lines.append(f"{'':{margin}}  {first}{last:>{len(plane[0]) - len(first)}}")
    return [line.rstrip()[:width] for line in lines]


def _share(value: float, low: float, high: float, is_log: bool) -> float:
    """Return how far ``value`` is on the way from ``low`` to ``high``, 0 to 1."""
    if high == low:
        return 0.0
    if is_log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)
