"""Small raw folders in the real layouts, made on the spot."""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

STEM = "AFAD-Lite.tar.xz"


def picture(seed: int, size: tuple[int, int] = (20, 24), mode: str = "RGB") -> Image.Image:
    """Return a small picture, another one for each seed."""
    width, height = size
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def write_afad(root: Path, num_people: int = 30, *, reverse: bool = False) -> list[str]:
    """Write faces; every third person has two photos, at different ages. Return their paths."""
    photos = []
    for person in range(1000, 1000 + num_people):
        age, sex = 18 + person % 22, ("111", "112")[person % 2]
        photos.append(f"{age}/{sex}/{person}-0.jpg")
        if person % 3 == 0:
            photos.append(f"{18 + (age - 17) % 22}/{sex}/{person}-1.jpg")
    for photo in sorted(photos, reverse=reverse):
        (root / photo).parent.mkdir(parents=True, exist_ok=True)
        picture(int(photo.split("/")[2].split("-")[0]) * 10 + int(photo[-5])).save(root / photo, quality=90)
    return photos


def write_png(folder: Path, ids: Iterable[int]) -> None:
    """Write a grey ``<id>.png`` for each id, portrait and landscape."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in ids:
        picture(number, (20, 26) if number % 2 else (26, 20), "L").save(folder / f"{number}.png")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a label table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


def read_rows(path: Path) -> list[list[str]]:
    """Read a table, its header included."""
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


def months(number: int) -> int:
    """Return the made-up bone age of an id."""
    return 12 + number % 200


def train_rows(ids: Iterable[int]) -> list[tuple[int, int, bool]]:
    """Return rows of a training table."""
    return [(number, months(number), bool(number % 2)) for number in ids]


def write_kaggle(root: Path, num: int = 40, num_test: int = 4) -> None:
    """Write Kaggle's (kmader) distribution: doubly nested folders, a test table without ages."""
    ids = range(1377, 1377 + num)
    write_png(root / "boneage-training-dataset" / "boneage-training-dataset", ids)
    write_csv(root / "boneage-training-dataset.csv", ("id", "boneage", "male"), train_rows(ids))
    test = range(4360, 4360 + num_test)
    if test:
        write_png(root / "boneage-test-dataset" / "boneage-test-dataset", test)
        write_csv(root / "boneage-test-dataset.csv", ("Case ID", "Sex"), [(number, "M") for number in test])


def write_official(root: Path, num: int = 40) -> None:
    """Write the official distribution: three sets, validation in two nested folders, test truth in CSV."""
    ids = range(1377, 1377 + num)
    write_png(root / "Bone Age Training Set" / "boneage-training-dataset", ids)
    write_csv(root / "Bone Age Training Set" / "train.csv", ("id", "boneage", "male"), train_rows(ids))
    base = root / "Bone Age Validation Set"
    for part, first in (("1", 9000), ("2", 9005)):
        name = f"boneage-validation-dataset-{part}"
        write_png(base / name / name, range(first, first + 5))
    rows = [(number, "TRUE" if number % 2 else "FALSE", months(number)) for number in range(9000, 9010)]
    write_csv(base / "Validation Dataset.csv", ("Image ID", "male", "Bone Age (months)"), rows)
    test = range(4360, 4366)
    write_png(root / "Bone Age Test Set" / "boneage-testing-dataset", test)
    header = ("Case ID", "Sex", "Ground truth bone age (months)")
    truth = [(number, "F", months(number) + 0.93) for number in test]
    write_csv(root / "Bone Age Test Set" / "Bone age ground truth.csv", header, truth)


def write_neuro(root: Path, num: int = 40) -> None:
    """Write neu.ro's distribution: one table, one folder, one level down."""
    ids = range(1377, 1377 + num)
    write_png(root / "bone-age" / "train", ids)
    write_csv(root / "bone-age" / "boneage-training-dataset.csv", ("id", "boneage", "male"), train_rows(ids))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_parts(folder: Path, content: bytes, num: int = 5) -> Path:
    """Split an archive into parts as published and write their hashes; return the file of the hashes."""
    folder.mkdir(exist_ok=True)
    packed = lzma.compress(content)
    length = -(-len(packed) // num)
    lines = []
    for number in range(num):
        part = packed[number * length : (number + 1) * length]
        name = f"{STEM}a{'abcdefgh'[number]}"
        (folder / name).write_bytes(part)
        lines.append(f"{hashlib.sha1(b'blob %d' % len(part) + bytes(1) + part).hexdigest()} {name}\n")
    checksums = folder / "hashes"
    # The published lists name the other files of the repository too.
    checksums.write_text("".join(lines) + f"{'0' * 40} README.txt\n")
    return checksums


def tar_of(*entries: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """Return a tar file with the entries given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            tar.addfile(info, io.BytesIO(entry[1]))
    return buffer.getvalue()
