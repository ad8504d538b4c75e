"""The people of a synthetic set: labels, sexes, ids and file names, before anything is drawn.

Everything follows from a seed and a running number by numpy's SeedSequence. Nothing depends on the number of other
pictures, on their order or on the number of processes: a larger set begins with the smaller one of the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Streams of random numbers that may not coincide; part of the generator's version.
HAND_LABEL, HAND_IMAGE, PERSON_LABEL, PERSON_FACE, PHOTO, HAND_ROWS = range(1, 7)

# fmt: off
# Training images of the RSNA set in each year of bone age from 0 to 19, and its extreme labels in months.
RSNA_YEARS = (
    13, 78, 175, 231, 304, 531, 739, 877, 896, 444, 1210, 1665, 1400, 1947, 1002, 581, 209, 216, 74, 19,
)
RSNA_MONTHS = (1, 228)
FIRST_HAND = 1377

# Images of AFAD in each year of age from 18 to 39.
AFAD_FEMALE = (
    2553, 6379, 6930, 6960, 7794, 6191, 8146, 7398, 5174, 4469, 3543,
    3383, 3415, 3119, 2833, 2597, 2519, 2919, 2943, 2653, 2713, 2585,
)
AFAD_MALE = (
    3032, 6089, 6302, 5600, 5778, 4319, 4745, 3863, 2502, 2012, 1627,
    1347, 1391, 1337, 1163, 1104, 1337, 1327, 1291, 1245, 1085, 1206,
)
# fmt: on
AFAD_YOUNGEST, AFAD_OLDEST = 18, 39

# Shares of people with two and with three photos. In AFAD's published lists 3.4 % have more than one.
TWO_PHOTOS, THREE_PHOTOS = 0.05, 0.015


@dataclass(frozen=True)
class HandCase:
    """One radiograph to be drawn."""

    index: int  # running number from 0
    path: str  # relative to the root of the set
    number: int  # the id in the label table
    age: int  # bone age drawn, in months
    label: int  # bone age as read by the reader, in whole months: `age` plus the reader's error
    male: bool


@dataclass(frozen=True)
class FaceCase:
    """One photo to be drawn."""

    index: int  # running number from 0
    path: str  # relative to the root of the set
    person: int  # running number of the person
    age: int  # the label in years
    apparent_age: float  # what is drawn, in years: `age` plus the person's own offset
    male: bool


def stream(seed: int, purpose: int, index: int) -> np.random.Generator:
    """Return the random numbers of one image or person, the same on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, purpose, index))))


def hand_cases(num_images: int, seed: int, reader_sd: float) -> list[HandCase]:
    """List the hands of a set; bone ages and sexes are distributed as in the RSNA training set.

    Boys are older there (means 135.3 and 117.9 months), so the probability of a boy rises with the age.

    Args:
        num_images: Number of hands.
        seed: Seed of the set.
        reader_sd: Standard deviation of the reader's error in months; 0 for none.
    """
    shares = np.cumsum(RSNA_YEARS) / np.sum(RSNA_YEARS)
    cases = []
    for index in range(num_images):
        rng = stream(seed, HAND_LABEL, index)
        year = int(np.searchsorted(shares, rng.random(), side="right"))
        age = _clip(12 * year + int(rng.integers(12)), *RSNA_MONTHS)
        male = bool(rng.random() < 0.542 + 0.0025 * (age - 127.3))
        label = _clip(round(age + reader_sd * float(rng.standard_normal())), *RSNA_MONTHS)
        number = FIRST_HAND + index
        path = f"boneage-training-dataset/boneage-training-dataset/{number}.png"
        cases.append(HandCase(index, path, number, age, label, male))
    return cases


def face_cases(num_images: int, seed: int, apparent_age_sd: float) -> list[FaceCase]:
    """List the photos of a set; ages and sexes are distributed as in AFAD between 18 and 39.

    Further photos of a person are sometimes taken in later years and then lie in another age folder, as in AFAD.

    Args:
        num_images: Number of photos.
        seed: Seed of the set.
        apparent_age_sd: Standard deviation in years of the difference between how old a person looks and is.
            It is drawn once per person, so that it can be memorised but not inferred.
    """
    counts = np.array([AFAD_FEMALE, AFAD_MALE]).reshape(-1)
    shares = np.cumsum(counts) / counts.sum()
    cases: list[FaceCase] = []
    person = 0
    while len(cases) < num_images:
        rng = stream(seed, PERSON_LABEL, person)
        sex, years = divmod(int(np.searchsorted(shares, rng.random(), side="right")), len(AFAD_MALE))
        age, offset = AFAD_YOUNGEST + years, apparent_age_sd * float(rng.standard_normal())
        chance = rng.random()
        num_photos = 3 if chance < THREE_PHOTOS else 2 if chance < THREE_PHOTOS + TWO_PHOTOS else 1
        for k in range(min(num_photos, num_images - len(cases))):
            if k and rng.random() < 0.4:
                age = min(AFAD_OLDEST, age + 1)
            path = f"AFAD-Lite/{age}/{111 if sex else 112}/{_account(person)}-{k}.jpg"
            cases.append(FaceCase(len(cases), path, person, age, age + offset, bool(sex)))
        person += 1
    return cases


def _account(person: int) -> int:
    """Return a six-digit number, different for up to 900,000 people (7919 and 900,000 share no factor)."""
    return 100_000 + (person * 7919 + 538_660) % 900_000


def _clip(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)
