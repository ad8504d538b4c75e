"""The shapes that stand-ins are drawn with: areas, distances, windows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gramgn.synthetic.shapes import (
    arc_distance,
    axes,
    box_distance,
    cone_distance,
    coverage,
    ellipse_distance,
    smoothstep,
    soft_noise,
    to_bytes,
    unit,
    whole,
    window,
)

WIN = whole((120, 140))
U, V = axes(WIN, (70.3, 58.7), (1.0, 0.0))


@pytest.mark.parametrize("softness", [1.0, 1.7])
@pytest.mark.parametrize(
    ("d", "area"),
    [
        (ellipse_distance(U, V, 20.0, 20.0), math.pi * 400),
        (ellipse_distance(U, V, 35.0, 14.0), math.pi * 35 * 14),
        (cone_distance(U, V, 1e-3, 17.5, 17.5), math.pi * 17.5**2),
        (cone_distance(U, V, 30.0, 9.0, 9.0), math.pi * 81 + 30 * 18),
        (
            box_distance(np.abs(U) - np.float32(21), np.abs(V) - np.float32(11), 4.0),
            42 * 22 - (4 - math.pi) * 16,
        ),
    ],
    ids=["disk", "ellipse", "point", "capsule", "box"],
)
def test_covered_pixels_add_up_to_the_area_of_the_shape(d: np.ndarray, area: float, softness: float) -> None:
    assert coverage(d, softness).sum() == pytest.approx(area, rel=0.01)


def test_capsule_distance_is_that_to_the_nearest_point_of_its_axis() -> None:
    nearest = np.min(
        [np.hypot(U - place, V) for place in np.linspace(0, 30, 301)],
        axis=0,
    )
    np.testing.assert_allclose(cone_distance(U, V, 30.0, 5.0, 5.0), nearest - 5.0, atol=0.01)


def test_arc_passes_through_its_middle_and_ends_and_is_thinner_there() -> None:
    places = np.array([0.0, 20.0, -20.0], np.float32)
    heights = np.array([0.0, 6.0, 6.0], np.float32)
    middle, right, left = arc_distance(places, heights, 20.0, 6.0, 2.0)
    assert middle == pytest.approx(-2.0)
    assert right == left == pytest.approx(-0.4)


def test_axes_turn_with_the_direction() -> None:
    direction, length = unit((10.0, 10.0), (10.0, 50.0))
    assert (direction, length) == ((0.0, 1.0), 40.0)
    u, v = axes(WIN, (10.0, 10.0), direction)
    assert u[50, 10] == 40
    assert v[50, 10] == 0
    assert abs(v[10, 30]) == 20


def test_window_is_cut_at_the_picture_and_none_outside() -> None:
    win = window((20, 30), (-5.0, 3.2), (4.1, 6.0), 1.0)
    assert win is not None
    assert (win.rows, win.cols) == (slice(2, 8), slice(0, 7))
    assert win.x.shape == (1, 7)
    assert win.y.shape == (6, 1)
    layer = np.zeros((3, 20, 30), np.float32)
    win.of(layer)[:] = 1
    assert layer.sum() == 3 * 6 * 7
    assert window((20, 30), (31.0, 5.0), (40.0, 9.0)) is None
    assert window((20, 30), (5.0, -9.0), (8.0, -3.0)) is None


def test_all_arrays_stay_float32() -> None:
    for array in (
        U,
        V,
        coverage(ellipse_distance(U, V, 5.0, 4.0), 1.0),
        cone_distance(U, V, 9.0, 2.0, 3.0),
        arc_distance(U, V, 9.0, 2.0, 1.0),
        soft_noise(np.random.default_rng(0), (9, 12), 4),
    ):
        assert array.dtype == np.float32


def test_soft_noise_is_smooth_and_meets_the_grid() -> None:
    noise = soft_noise(np.random.default_rng(3), (64, 80), 4)
    grid = np.random.default_rng(3).standard_normal((5, 5), dtype=np.float32)
    np.testing.assert_array_equal(noise[::16, ::20], grid[:4, :4])
    assert np.abs(np.diff(noise, axis=0)).max() <= np.abs(np.diff(grid, axis=0)).max() / 16 + 1e-5


def test_smoothstep_and_rounding() -> None:
    assert [smoothstep(x) for x in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    given = np.array([-0.3, 0.0, 0.5, 0.999, 1.7], np.float32)
    assert to_bytes(given).tolist() == [0, 0, 128, 255, 255]
