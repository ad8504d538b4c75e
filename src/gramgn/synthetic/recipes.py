"""The files of a synthetic set: pictures, label tables, and the stray files that come with the real sets."""

from __future__ import annotations

import io
import zlib
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gramgn.synthetic.faces import draw_face, make_person
from gramgn.synthetic.hands import draw_hand
from gramgn.synthetic.people import (
    HAND_IMAGE,
    HAND_ROWS,
    PERSON_FACE,
    PHOTO,
    FaceCase,
    HandCase,
    face_cases,
    hand_cases,
    stream,
)
from gramgn.synthetic.store import Recipe

JPEG_QUALITY = (85, 95)
HAND_BYTES, FACE_BYTES = 21_000, 7_000  # typical sizes of a file

# What Windows and macOS leave in folders; enough of it to be recognised as no picture.
_THUMBS_DB = bytes.fromhex("d0cf11e0a1b11ae1") + bytes(504)
_DS_STORE = b"\x00\x00\x00\x01Bud1" + bytes(56)


def hand_recipe(num_images: int, seed: int, reader_sd: float) -> Recipe:
    """Return the content of the synthetic RSNA Bone Age set, in the layout of its Kaggle distribution."""
    cases = hand_cases(num_images, seed, reader_sd)
    order = stream(seed, HAND_ROWS, 0).permutation(num_images)
    rows = [f"{cases[i].number},{cases[i].label},{cases[i].male}\n" for i in order]
    extras = {
        "boneage-training-dataset.csv": ("id,boneage,male\n" + "".join(rows)).encode(),
        "boneage-training-dataset/boneage-training-dataset/Thumbs.db": _THUMBS_DB,
        ".DS_Store": _DS_STORE,
    }
    return Recipe(cases, partial(hand_file, seed), extras, HAND_BYTES)


def face_recipe(num_images: int, seed: int, apparent_age_sd: float) -> Recipe:
    """Return the content of the synthetic AFAD-Lite set."""
    cases = face_cases(num_images, seed, apparent_age_sd)
    names = sorted(case.path.removeprefix("AFAD-Lite/") for case in cases)
    folders = sorted({case.path.rpartition("/")[0] for case in cases})
    extras = {f"{folder}/Thumbs.db": _THUMBS_DB for folder in folders[::7]}
    extras["AFAD-Lite/AFAD-Lite.txt"] = "".join(f"./{name}\n" for name in names).encode()
    return Recipe(cases, partial(face_file, seed), extras, FACE_BYTES)


def hand_file(seed: int, case: HandCase) -> bytes:
    """Draw one hand and return its PNG file (8-bit grey)."""
    pixels = draw_hand(case.age, case.male, stream(seed, HAND_IMAGE, case.index))
    # On noisy pictures run lengths alone take half the time of the default and give files as small. The bytes also
    # depend least on the version of zlib.
    return _encode(pixels, "PNG", compress_type=zlib.Z_RLE)


def face_file(seed: int, case: FaceCase) -> bytes:
    """Draw one photo and return its JPEG file (RGB, quality 85 to 95)."""
    person = make_person(case.apparent_age, case.male, stream(seed, PERSON_FACE, case.person))
    rng = stream(seed, PHOTO, case.index)
    pixels = draw_face(person, rng)
    return _encode(pixels, "JPEG", quality=int(rng.integers(JPEG_QUALITY[0], JPEG_QUALITY[1] + 1)))


def _encode(pixels: NDArray[np.uint8], file_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format, **options)
    return buffer.getvalue()
