"""The people of a synthetic set: labels, names, people; nothing depends on how many are drawn."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from gramgn.synthetic import face_cases, hand_cases, stream

HANDS = hand_cases(4000, seed=3, reader_sd=0.0)
FACES = face_cases(4000, seed=3, apparent_age_sd=5.0)


def test_a_larger_set_begins_with_the_smaller_one() -> None:
    assert hand_cases(50, 3, 0.0) == HANDS[:50]
    # The last person of the smaller set may have lost photos to the limit, never changed them.
    assert face_cases(50, 3, 5.0) == FACES[:50]


def test_seeds_and_purposes_are_independent_streams() -> None:
    values = {
        stream(seed, purpose, index).random() for seed in (0, 1) for purpose in (1, 2) for index in (0, 1)
    }
    assert len(values) == 8
    assert stream(0, 1, 5).random() == stream(0, 1, 5).random()
    assert [case.age for case in hand_cases(50, 4, 0.0)] != [case.age for case in HANDS[:50]]


def test_hands_are_distributed_as_the_real_ones() -> None:
    ages = np.array([case.age for case in HANDS], float)
    male = np.array([case.male for case in HANDS])
    assert ages.min() >= 1
    assert ages.max() <= 228
    assert ages.mean() == pytest.approx(129, abs=3)
    assert ages.std() == pytest.approx(41.2, abs=2)
    assert male.mean() == pytest.approx(0.542, abs=0.03)
    assert ages[male].mean() - ages[~male].mean() == pytest.approx(17.4, abs=4)


def test_hand_names_are_unique_and_begin_at_1377() -> None:
    assert [case.number for case in HANDS] == list(range(1377, 1377 + 4000))
    assert len({case.path for case in HANDS}) == 4000
    assert HANDS[0].path == "boneage-training-dataset/boneage-training-dataset/1377.png"


def test_reader_error_is_an_option() -> None:
    assert all(case.label == case.age for case in HANDS)
    noisy = hand_cases(4000, 3, 6.0)
    assert [case.age for case in noisy] == [case.age for case in HANDS]
    errors = np.array([case.label - case.age for case in noisy])
    assert errors.std() == pytest.approx(6, abs=0.4)
    assert min(case.label for case in noisy) >= 1


def test_face_paths_tell_age_sex_and_person() -> None:
    numbers: dict[int, set[str]] = defaultdict(set)
    for case in FACES:
        top, age, sex, name = case.path.split("/")
        assert (top, int(age), sex) == ("AFAD-Lite", case.age, "111" if case.male else "112")
        assert 18 <= case.age <= 39
        assert len(name.split("-")[0]) == 6
        numbers[case.person].add(name.split("-")[0])
    assert all(len(found) == 1 for found in numbers.values())
    assert len({next(iter(found)) for found in numbers.values()}) == len(numbers)
    assert len({case.path for case in FACES}) == len(FACES)


def test_some_people_have_two_or_three_photos_and_some_of_those_grow_older() -> None:
    photos = Counter(case.person for case in FACES)
    assert set(photos.values()) == {1, 2, 3}
    assert 0.03 < sum(number > 1 for number in photos.values()) / len(photos) < 0.10
    ages = defaultdict(set)
    for case in FACES:
        ages[case.person].add(case.age)
    assert any(len(found) > 1 for found in ages.values())


def test_apparent_age_is_one_offset_a_person() -> None:
    offsets: dict[int, list[float]] = defaultdict(list)
    for case in FACES:
        offsets[case.person].append(case.apparent_age - case.age)
    assert all(np.ptp(found) < 1e-9 for found in offsets.values())
    assert np.std([found[0] for found in offsets.values()]) == pytest.approx(5, abs=0.25)
    assert all(case.apparent_age == case.age for case in face_cases(200, 3, 0.0))


def test_faces_are_distributed_as_the_real_ones() -> None:
    """AFAD between 18 and 39: a mean age of 25.8 years, 39 % men."""
    ages = np.array([case.age for case in FACES], float)
    assert ages.mean() == pytest.approx(25.8, abs=0.4)
    assert np.mean([case.male for case in FACES]) == pytest.approx(59_702 / 156_918, abs=0.03)
