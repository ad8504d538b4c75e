"""RSNA Pediatric Bone Age 2017: hand radiographs ``<id>.png`` and label tables, in any distribution."""

from __future__ import annotations

import filecmp
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Unpack

from gramgn.data import _check
from gramgn.data._dataset import ImageDataset
from gramgn.data._labels import Label, LabelTables, read_tables, role_of
from gramgn.data._scan import is_unicode, walk
from gramgn.data._types import DatasetOptions, Index, Item, Unused
from gramgn.errors import DataError

TEST_FROM = ("auto", "validation", "test", "split")
PREFIX = {"train": "", "validation": "validation-", "test": "test-"}
EXAMPLES = 3
MAX_LOOKED_AT = 100_000


@dataclass(frozen=True)
class _Image:
    """A radiograph: its path relative to the root, its id, and the official set that its folder tells."""

    path: str
    id: int
    role: str


@dataclass
class _Join:
    """Labels with their images, and what found no partner."""

    pairs: list[tuple[Label, _Image]] = field(default_factory=list)
    missing: list[Label] = field(default_factory=list)
    extra: list[_Image] = field(default_factory=list)


class RSNA(ImageDataset):
    """RSNA Bone Age: 12,611 training radiographs, 1,425 validation, 200 test; targets are months.

    The official, the Kaggle (kmader) and the neu.ro distributions are read: label tables are recognised by
    their columns, images by their integer name, both at any depth. No order of rows or files matters.

    Args:
        root: Folder that holds the label tables and images, at any depth.
        test_from: Which images are the test split. ``"validation"``: the official validation set, training
            images are split 90/10; ``"test"``: the official test set, the official validation set (where
            present) is ``val``; ``"split"``: training images are split 80/10/10; ``"auto"``: ``"validation"``
            where present, else ``"split"``.
        max_unmatched: Largest share of label rows without an image, or without a usable age, that is
            tolerated.
        options: See `ImageDataset`.

    Raises:
        ConfigError: An option or a value that is not known.
    """

    unit: ClassVar[str] = "months"
    natural_channels: ClassVar[int] = 1
    stand_in: ClassVar[str] = "rsna_synthetic"
    layout: ClassVar[str] = (
        "a label table (columns id,boneage,male) such as boneage-training-dataset.csv and images <id>.png, "
        "e.g. in boneage-training-dataset/, at any depth"
    )
    source: ClassVar[str] = (
        "https://www.rsna.org/rsnai/ai-image-challenge/rsna-pediatric-bone-age-challenge-2017 or Kaggle "
        "kmader/rsna-bone-age (non-commercial research and education; cite Halabi et al., Radiology 2018)"
    )

    def __init__(
        self,
        root: str | Path = "data/raw/rsna",
        *,
        test_from: str = "auto",
        max_unmatched: float = 0.01,
        **options: Unpack[DatasetOptions],
    ) -> None:
        options.setdefault("name", "rsna")
        super().__init__(root, **options)
        self.test_from = _check.choice("test_from", test_from, TEST_FROM)
        self.max_unmatched = _check.number("max_unmatched", max_unmatched, minimum=0.0, maximum=1.0)

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which radiographs are used."""
        return {"test_from": self.test_from, "max_unmatched": self.max_unmatched}

    def has_raw(self) -> bool:
        """Say whether a table and an image with an integer name are anywhere below ``root``."""
        table = image = False
        for _, path, ignored in islice(walk(self.root), MAX_LOOKED_AT):
            if not ignored:
                table = table or path.suffix.lower() in (".csv", ".xlsx")
                image = image or _image_id(path.name) is not None
            if table and image:
                return True
        return False

    def index(self) -> Index:
        """Find and join label rows and images.

        Raises:
            DataError: No label table, or more label rows without image or age than ``max_unmatched`` allows.
        """
        images, unused = self._images()
        tables = read_tables(self.root)
        unused += tables.unused
        if not tables.labels:
            raise DataError(self.missing_message() + self._tables_found(tables))
        images, doubles = _without_doubles(self.root, images)
        join = _join(tables.labels, images)
        self._check_join(join, tables)
        unused += doubles + self._unmatched(join, tables)
        official = self._official_splits({label.role for label, _ in join.pairs})
        items = []
        for label, image in join.pairs:
            key = f"{PREFIX[label.role]}{label.id}"
            if label.role in official:
                items.append(Item(key, image.path, label.months, "", label.sex, official[label.role]))
            else:
                unused.append(
                    Unused(image.path, f"official {label.role} set, not used with test_from={self.test_from}")
                )
        facts = {"tables": tables.facts, "counts": self._counts(join, tables)}
        return Index(items, unused, self._notes(join, tables), facts)

    def _images(self) -> tuple[list[_Image], list[Unused]]:
        images, unused = [], []
        for relative, path, ignored in walk(self.root):
            number = _image_id(path.name)
            if ignored or not is_unicode(relative):
                reason = "system or hidden file" if ignored else "file name is not valid Unicode"
                unused.append(Unused(relative, reason))
            elif number is not None:
                images.append(_Image(relative, number, role_of(Path(relative).parent.parts)))
            elif path.suffix.lower() not in (".csv", ".xlsx"):
                unused.append(Unused(relative, "name is not <id>.png"))
        return images, unused

    def _check_join(self, join: _Join, tables: LabelTables) -> None:
        """Raise DataError where too many labels have no image, or too many rows no usable age."""
        num_rows = len(tables.labels) + len(tables.bad_rows)
        bad = len(join.missing) + len(tables.bad_rows)
        if join.pairs and bad <= self.max_unmatched * num_rows:
            return
        counts = ", ".join(f"{number} {what}" for what, number in self._counts(join, tables).items())
        raise DataError(
            f"dataset {self.name}: label tables and images in {self.root} do not match: {counts}\n"
            f"  labels without an image, e.g.: {_examples([f'{label.id}.png' for label in join.missing])}\n"
            f"  label rows without one usable age, e.g.: {_examples([row.path for row in tables.bad_rows])}\n"
            f"  images without a label, e.g.: {_examples([image.path for image in join.extra])}\n"
            f"  {bad} of {num_rows} rows cannot be used; allowed is a share of dataset.max_unmatched="
            f"{self.max_unmatched}. Complete the download, or allow more"
        )

    def _official_splits(self, present: set[str]) -> dict[str, str]:
        """Return for each official set in use its binding split, empty where the rule decides."""
        wanted = self.test_from
        if wanted == "auto":
            wanted = "validation" if "validation" in present else "split"
        if wanted != "split" and wanted not in present:
            raise DataError(
                f"dataset {self.name}: test_from={self.test_from}, but {self.root} has no {wanted} set with "
                f"bone ages. Sets found: {', '.join(sorted(present))}. Use dataset.test_from=auto, or "
                f"complete the download"
            )
        if wanted == "split":
            return {"train": ""}
        if wanted == "validation":
            return {"train": "", "validation": "test"}
        if "validation" in present:
            return {"train": "train", "validation": "val", "test": "test"}
        return {"train": "", "test": "test"}

    def _unmatched(self, join: _Join, tables: LabelTables) -> list[Unused]:
        reasons = {image.path: _extra_reason(image, tables) for image in join.extra}
        return [
            *(Unused(f"{label.table}: id {label.id}", "label without an image") for label in join.missing),
            *tables.bad_rows,
            *(Unused(path, reason) for path, reason in reasons.items()),
        ]

    @staticmethod
    def _counts(join: _Join, tables: LabelTables) -> dict[str, int]:
        return {
            "matched": len(join.pairs),
            "labels without an image": len(join.missing),
            "images without a label": sum(i.id not in tables.unusable_ids for i in join.extra),
            "ids labelled twice": tables.num_duplicates,
            "ids labelled twice with different ages": tables.num_conflicts,
            "rows without a usable age": tables.num_blank,
        }

    def _notes(self, join: _Join, tables: LabelTables) -> list[str]:
        counts = [f"{number} {what}" for what, number in self._counts(join, tables).items() if number]
        return ["labels and images joined: " + ", ".join(counts), *tables.notes]

    @staticmethod
    def _tables_found(tables: LabelTables) -> str:
        seen = [entry.path for entry in tables.unused]
        return f"\n  tables found, none of them with usable columns: {_examples(seen)}" if seen else ""


def _image_id(name: str) -> int | None:
    """Return the id in a file's name ``<id>.png``, leading zeros allowed; None for any other name."""
    stem, dot, suffix = name.rpartition(".")
    is_id = bool(dot) and suffix.lower() == "png" and stem.isascii() and stem.isdigit()
    return int(stem) if is_id and len(stem) <= 12 else None


def _without_doubles(root: Path, images: list[_Image]) -> tuple[list[_Image], list[Unused]]:
    """Keep one of the files that unpacking twice has left; raise DataError where their bytes differ."""
    by_id: dict[tuple[str, int], list[_Image]] = defaultdict(list)
    for image in sorted(images, key=lambda image: image.path):
        by_id[image.role, image.id].append(image)
    doubles = []
    for first, *others in by_id.values():
        for other in others:
            if not filecmp.cmp(root / first.path, root / other.path, shallow=False):
                raise DataError(
                    f"two different images for id {first.id}: {root / first.path} and {root / other.path}. "
                    f"Remove the wrong one"
                )
            doubles.append(Unused(other.path, "second copy of an image"))
    return [images[0] for images in by_id.values()], doubles


def _join(labels: list[Label], images: list[_Image]) -> _Join:
    """Pair labels and images: by set and id first, then by id alone among the images that nobody claimed."""
    by_key = {(image.role, image.id): image for image in images}
    join, rest = _Join(), []
    for label in labels:
        image = by_key.pop((label.role, label.id), None)
        if image is None:
            rest.append(label)
        else:
            join.pairs.append((label, image))
    by_id = {image.id: image for image in sorted(by_key.values(), key=lambda image: image.role, reverse=True)}
    for label in rest:
        image = by_id.pop(label.id, None)
        if image is None:
            join.missing.append(label)
        else:
            join.pairs.append((label, image))
    claimed = {image.path for _, image in join.pairs}
    join.extra = sorted(
        (image for image in images if image.path not in claimed), key=lambda image: image.path
    )
    return join


def _extra_reason(image: _Image, tables: LabelTables) -> str:
    if image.role == "test" and image.id in tables.ids_without_age:
        return "no bone age in this distribution"
    if image.id in tables.unusable_ids:
        return "image whose label cannot be used"
    return "image without a label"


def _examples(names: list[str]) -> str:
    return ", ".join(names[:EXAMPLES]) + (", ..." if len(names) > EXAMPLES else "") if names else "none"
