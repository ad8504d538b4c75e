"""RSNA Pediatric Bone Age 2017: hand radiographs `<id>.png` or `.jpg` and label tables, in any distribution."""

from __future__ import annotations

import filecmp
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gramgn.data.dataset import ImageDataset
from gramgn.data.labels import MAX_MONTHS, TABLE_SUFFIXES, LabelTables, read_tables, role_of, rows_of
from gramgn.data.scan import HIDDEN, some, walk
from gramgn.data.types import Index, Item, Unused
from gramgn.errors import DataError, checked_choice, checked_number

if TYPE_CHECKING:
    import pandas as pd

TEST_FROM = ("auto", "validation", "test", "split")
PREFIX = {"train": "", "validation": "validation-", "test": "test-"}
EXAMPLES = 3
SUFFIXES = ("png", "jpg", "jpeg")
MAX_LOOKED_AT = 100_000
MAX_YEARS = 20


class _Join(NamedTuple):
    """Labels with their images, and labels and images without a partner."""

    pairs: pd.DataFrame  # columns of the labels, and the image's `path`
    missing: pd.DataFrame  # labels without an image
    extra: pd.DataFrame  # images without a label: `path`, `id` and `role`, sorted by path


class RSNA(ImageDataset):
    """RSNA Bone Age: 12,611 training radiographs, 1,425 validation, 200 test; targets are months.

    The official, the Kaggle (kmader) and the neu.ro distributions are read: label tables are recognised by
    their columns, images by their integer name, both at any depth. No order of rows or files matters.

    Args:
        root: Folder that holds the label tables and images, at any depth.
        test_from: Source of the test split. `"validation"`: the official validation set, and training images are
            split 90/10; `"test"`: the official test set, and the official validation set (if present) is `val`;
            `"split"`: training images are split 80/10/10; `"auto"` (the default): `"validation"` if present, else
            `"split"`.
        max_unmatched: Largest share of label rows without an image, or without a usable age, that is
            tolerated; 0.01 by default.
        options: See `ImageDataset`.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    unit: ClassVar[str] = "months"
    natural_channels: ClassVar[int] = 1
    plausible: ClassVar[tuple[float, float]] = (0, MAX_MONTHS)
    substitute: ClassVar[str] = "rsna_synthetic"
    augmentations: ClassVar[tuple[str, ...]] = ("flip", "crop", "rotate")
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
        **options: Any,
    ) -> None:
        options.setdefault("name", "rsna")
        super().__init__(root, **options)
        self.test_from = checked_choice("dataset.test_from", test_from, TEST_FROM)
        self.max_unmatched = checked_number("dataset.max_unmatched", max_unmatched, minimum=0.0, maximum=1.0)

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which radiographs are used."""
        return {"test_from": self.test_from, "max_unmatched": self.max_unmatched}

    def has_raw(self) -> bool:
        """Return whether a table and an image with an integer name are anywhere below `root`."""
        table = image = False
        for _, path, ignored in islice(walk(self.root), MAX_LOOKED_AT):
            if not ignored:
                table = table or path.suffix.lower() in TABLE_SUFFIXES
                image = image or _image_id(path.name) is not None
            if table and image:
                return True
        return False

    def index(self) -> Index:
        """Find and join label rows and images.

        Raises:
            DataError: No label table, or more label rows without image or age than `max_unmatched` allows.
        """
        images, unused = self._images()
        tables = read_tables(self.root)
        unused += tables.unused
        if tables.labels.empty:
            raise DataError("\n  ".join([self.missing_message(), *_faults(tables)]))
        images, copies = _without_copies(self.root, images)
        join = _join(tables.labels, images)
        self._check_join(join, tables)
        unused += copies + tables.bad_rows
        unused += [
            Unused(f"{row.table}: id {row.id}", "label without an image") for row in rows_of(join.missing)
        ]
        unused += [Unused(row.path, _extra_reason(row, tables)) for row in rows_of(join.extra)]
        official = self._official_splits(set(join.pairs["role"]))
        items = []
        for row in rows_of(join.pairs):
            if row.role in official:
                key = f"{PREFIX[row.role]}{row.id}"
                items.append(Item(key, row.path, row.months, "", row.sex, official[row.role]))
            else:
                reason = f"official {row.role} set, not used with test_from={self.test_from}"
                unused.append(Unused(row.path, reason))
        counts = self._counts(join, tables)
        joined = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        notes = [f"labels and images joined: {joined}", *tables.notes]
        if items and (largest := max(item.target for item in items)) <= MAX_YEARS:
            notes.append(f"the largest bone age is {largest:g}: it is taken in months; are these years?")
        return Index(items, unused, notes, {"tables": tables.facts, "counts": counts})

    def _images(self) -> tuple[pd.DataFrame, list[Unused]]:
        """Return the radiographs, with the official set named by their folder, and all other files."""
        import pandas as pd

        images, unused = [], []
        for relative, path, ignored in walk(self.root):
            number = _image_id(path.name)
            if ignored:
                unused.append(Unused(relative, HIDDEN))
            elif number is not None:
                images.append((relative, number, role_of(Path(relative).parent.parts)))
            elif path.suffix.lower() not in TABLE_SUFFIXES:
                unused.append(Unused(relative, "name is not <id>.png"))
        return pd.DataFrame(images, columns=["path", "id", "role"]).sort_values("path"), unused

    def _check_join(self, join: _Join, tables: LabelTables) -> None:
        """Raise DataError if too many labels have no image, or too many rows no usable age."""
        num_rows = len(tables.labels) + len(tables.bad_rows)
        bad = len(join.missing) + len(tables.bad_rows)
        if len(join.pairs) and bad <= self.max_unmatched * num_rows:
            return
        counts = ", ".join(f"{number} {what}" for what, number in self._counts(join, tables).items())
        reasons = {row.reason for row in tables.bad_rows}

        def examples(names: list[str]) -> str:
            return some(names, EXAMPLES) or "none"

        raise DataError(
            f"dataset {self.name}: label tables and images in {self.root} do not match: {counts}\n"
            f"  labels without an image, e.g.: {examples([f'{number}.png' for number in join.missing['id']])}\n"
            + "".join(
                f"  {reason}, e.g.: {examples([row.path for row in tables.bad_rows if row.reason == reason])}\n"
                for reason in sorted(reasons)
            )
            + f"  images without a label, e.g.: {examples(join.extra['path'].tolist())}\n"
            f"  {bad} of {num_rows} rows cannot be used; allowed is a share of dataset.max_unmatched="
            f"{self.max_unmatched}. Complete the download, or allow more"
        )

    def _official_splits(self, present: set[str]) -> dict[str, str]:
        """Return the binding split of each official set in use, or an empty string if the split rule decides."""
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

    @staticmethod
    def _counts(join: _Join, tables: LabelTables) -> dict[str, int]:
        return {
            "matched": len(join.pairs),
            "labels without an image": len(join.missing),
            "images without a label": int((~join.extra["id"].isin(tables.unusable_ids)).sum()),
            "ids labelled twice": tables.num_duplicates,
            "ids labelled twice with different ages": tables.num_conflicts,
            "rows without a usable age": tables.num_blank,
        }


def _faults(tables: LabelTables) -> list[str]:
    """Return, for a message, why no row of the tables can be used."""
    lines = [
        f"the table {name} has the columns {some(header, 6) or 'none'}"
        for name, header in list(tables.headers.items())[:EXAMPLES]
    ]
    return lines + [f"{row.path}: {row.reason}" for row in tables.bad_rows[:EXAMPLES]]


def _image_id(name: str) -> int | None:
    """Return the id in a file's name, e.g. `<id>.png`, leading zeros allowed; None for any other name."""
    stem, dot, suffix = name.rpartition(".")
    is_id = bool(dot) and suffix.lower() in SUFFIXES and stem.isascii() and stem.isdigit()
    return int(stem) if is_id and len(stem) <= 12 else None


def _without_copies(root: Path, images: pd.DataFrame) -> tuple[pd.DataFrame, list[Unused]]:
    """Keep one of the copies that unpacking twice leaves; raise DataError if their bytes differ."""
    is_copy = images.duplicated(["role", "id"])
    first = images[~is_copy].set_index(["role", "id"])["path"]
    copies = []
    for copy in rows_of(images[is_copy]):
        original = str(first[copy.role, copy.id])
        if not filecmp.cmp(root / original, root / copy.path, shallow=False):
            raise DataError(
                f"two different images for id {copy.id}: {root / original} and {root / copy.path}. "
                f"Remove the wrong one"
            )
        copies.append(Unused(copy.path, "second copy of an image"))
    return images[~is_copy], copies


def _join(labels: pd.DataFrame, images: pd.DataFrame) -> _Join:
    """Pair labels and images: by set and id first, then by id alone among the images without a label."""
    import pandas as pd

    first = labels.merge(images, on=["role", "id"])
    rest = labels.merge(first[["role", "id"]], how="left", indicator=True).query("_merge == 'left_only'")
    rest = rest.drop(columns="_merge").drop_duplicates("id")
    free = images[~images["path"].isin(first["path"])].sort_values("role").drop_duplicates("id")
    second = rest.merge(free[["id", "path"]], on="id")
    pairs = pd.concat([first, second])
    missing = labels.merge(pairs[["role", "id"]], how="left", indicator=True).query("_merge == 'left_only'")
    return _Join(pairs, missing, images[~images["path"].isin(pairs["path"])])


def _extra_reason(image: Any, tables: LabelTables) -> str:
    if image.role == "test" and image.id in tables.ids_without_age:
        return "no bone age in this distribution"
    if image.id in tables.unusable_ids:
        return "image whose label cannot be used"
    return "image without a label"
