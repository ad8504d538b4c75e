"""What is drawn: anatomy follows the age, everything else does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gramgn.synthetic import (
    CARPALS,
    GROWTH,
    RAYS,
    Hand,
    draw_bones,
    draw_face,
    draw_hand,
    joints,
    make_person,
    stream,
)

BOY, GIRL = 0, 1
SCALE = 300.0


def upright(age: float, sex: int) -> Hand:
    """Return a large upright hand of an age in years."""
    return Hand(age, sex, origin=(160.0, 420.0), scale=SCALE, angle=0.0, spread=1.0, softness=1.0)


def bones(hand: Hand, index: int = 0) -> np.ndarray:
    layer = np.zeros((470, 400), np.float32)
    draw_bones(layer, hand, stream(0, 99, index))
    return layer


def at(layer: np.ndarray, hand: Hand, x: float, y: float) -> float:
    right, down = hand.place(x, y)
    return float(layer[round(down), round(right)])


@pytest.mark.parametrize("sex", [BOY, GIRL])
@pytest.mark.parametrize("name", CARPALS)
def test_carpal_appears_at_its_onset(name: str, sex: int) -> None:
    carpal = CARPALS[name]
    alone = [other for other in CARPALS.values() if other is not carpal]
    nearest = min(np.hypot(carpal.x - other.x, carpal.y - other.y) for other in alone)
    assert nearest > 0.02
    early, late = upright(0.6 * carpal.onset[sex], sex), upright(1.6 * carpal.onset[sex] + 0.5, sex)
    before = np.mean([at(bones(early, i), early, carpal.x, carpal.y) for i in range(4)])
    after = np.mean([at(bones(late, i), late, carpal.x, carpal.y) for i in range(4)])
    # The pisiform lies in front of the triquetrum, so it adds to what is there.
    assert after > before + 0.15
    assert name == "pisiform" or before < 0.05


@pytest.mark.parametrize("sex", [BOY, GIRL])
def test_growth_plate_is_open_in_a_child_and_closed_in_an_adult(sex: int) -> None:
    growth = GROWTH["proximal"]

    def darkest(age: float) -> float:
        hand = upright(age, sex)
        layer = bones(hand)
        (x0, y0), (x1, y1) = joints(RAYS["middle"], hand, "middle")[1:3]
        share = np.linspace(0.06, 0.35, 120)
        return min(at(layer, hand, x0 + s * (x1 - x0), y0 + s * (y1 - y0)) for s in share)

    assert darkest(growth.fusion[sex] - 4) < 0.1
    assert darkest(growth.fusion[sex] + 2) > 0.4


def test_epiphysis_appears_and_widens() -> None:
    def density(age: float) -> float:
        hand = upright(age, BOY)
        (x0, y0), _ = joints(RAYS["middle"], hand, "middle")[1:3]
        layer = bones(hand)
        return sum(at(layer, hand, x0 + offset, y0 + 0.017) for offset in np.linspace(-0.04, 0.04, 33))

    densities = [density(age) for age in (0.5, 3.0, 7.0, 13.0)]
    assert densities[0] == 0
    assert densities == sorted(set(densities))


def test_girls_mature_before_boys() -> None:
    """The same child: the same random numbers, the same age."""
    for age in (3.0, 5.0, 10.0, 15.0):
        assert np.mean([bones(upright(age, GIRL), i).sum() for i in range(3)]) > np.mean(
            [bones(upright(age, BOY), i).sum() for i in range(3)]
        )


def test_the_frame_does_not_depend_on_age_or_sex() -> None:
    for index in range(6):
        shapes = {
            draw_hand(age, male, stream(0, 99, index)).shape
            for age, male in ((12.0, True), (108.0, False), (216.0, True))
        }
        assert len(shapes) == 1


def test_hand_pictures_have_the_promised_sizes_and_both_orientations() -> None:
    shapes = []
    for index in range(30):
        picture = draw_hand(100, True, stream(0, 99, index))
        assert picture.dtype == np.uint8
        assert picture.ndim == 2
        assert picture.max() > picture.min() + 40
        shapes.append(picture.shape)
    assert all(160 <= max(shape) <= 256 for shape in shapes)
    portrait = sum(height > width for height, width in shapes)
    assert 20 < portrait < 30


def test_same_random_numbers_same_picture() -> None:
    first, again, other = (draw_hand(60, False, stream(5, 99, index)) for index in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or (first != other).any()


@pytest.mark.parametrize("months", [1, 228])
def test_extreme_ages_are_drawn(months: int) -> None:
    assert draw_hand(months, True, stream(0, 99, 3)).std() > 5


def test_face_is_a_square_of_the_promised_size() -> None:
    for index in range(10):
        person = make_person(25.0, index % 2 == 0, stream(0, 98, index))
        photo = draw_face(person, stream(0, 97, index))
        assert photo.dtype == np.uint8
        assert photo.shape == (photo.shape[0], photo.shape[0], 3)
        assert 60 <= photo.shape[0] <= 200
        assert photo.std() > 15


def test_photos_of_one_person_differ_and_their_traits_do_not() -> None:
    young, old = (make_person(age, True, stream(0, 98, 4)) for age in (20.0, 38.0))
    assert young.t < old.t
    assert replace(young, t=0.0) == replace(old, t=0.0)
    first, second = (draw_face(young, stream(0, 97, index)) for index in (0, 1))
    assert first.shape != second.shape or (first != second).any()


def test_age_changes_lines_and_leaves_the_frame() -> None:
    """The same photo of the same person, younger and older: the same size and background, other lines."""
    for index in range(6):
        person = make_person(20.0, False, stream(0, 98, index))
        young, old = (draw_face(replace(person, t=t), stream(0, 97, index)).astype(int) for t in (0.0, 1.0))
        assert young.shape == old.shape
        np.testing.assert_array_equal(young[:3, :3], old[:3, :3])
        side = young.shape[0]
        middle = slice(side // 4, 3 * side // 4)
        assert np.abs(young - old)[middle, middle].max() > 15
