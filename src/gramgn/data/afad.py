"""The Asian Face Age Dataset: `<age>/<111 male|112 female>/<person>-<k>.jpg` (Niu et al., CVPR 2016)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from gramgn.data.dataset import ImageDataset
from gramgn.data.scan import HIDDEN, SYNTHETIC_MARKER, entries, folders, is_ignored, some
from gramgn.data.types import Index, Item, Unused
from gramgn.errors import DataError, checked_choice, checked_whole

VARIANTS = {"lite": "AFAD-Lite", "full": "AFAD-Full"}
AGES = {"lite": (18, 39), "full": (15, 72)}
SEX_OF_FOLDER = {"111": "M", "112": "F"}
NESTING = 2
_AGE = re.compile(r"[0-9]{1,3}")
_PHOTO = re.compile(r"([0-9]+)-[0-9]+\.jpe?g", re.IGNORECASE)


class AFAD(ImageDataset):
    """AFAD-Lite (59,344 faces, ages 18 to 39) or AFAD-Full (165,501 faces, ages 15 to 72).

    The number before the hyphen of a file's name identifies a person: all photos of a person stay in one split. The
    age is the folder's name; the label tables in circulation hold age minus 15 and are not read.

    Args:
        root: Folder with the age folders, or one or two levels above them.
        variant: `"lite"` (the default) or `"full"`.
        max_age: Leave out older faces; no bound if None (the default). 40 gives the usual range of AFAD-Full.
        options: See `ImageDataset`.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    unit: ClassVar[str] = "years"
    natural_channels: ClassVar[int] = 3
    plausible: ClassVar[tuple[float, float]] = (1, 110)
    substitute: ClassVar[str] = "afad_synthetic"
    augmentations: ClassVar[tuple[str, ...]] = ("flip", "crop", "rotate")
    layout: ClassVar[str] = "AFAD-Lite/<age 18 to 39>/<111 male | 112 female>/<person>-<k>.jpg"
    source: ClassVar[str] = (
        "https://afad-dataset.github.io (academic research only); downloaded archive parts are unpacked by "
        "python scripts/prepare_data.py dataset=afad archive=<folder of the parts>"
    )

    def __init__(
        self,
        root: str | Path = "data/raw/afad",
        *,
        variant: str = "lite",
        max_age: int | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("name", "afad")
        super().__init__(root, **options)
        self.variant = checked_choice("dataset.variant", variant, tuple(VARIANTS))
        self.max_age = None if max_age is None else checked_whole("dataset.max_age", max_age, minimum=1)

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which faces are used."""
        return {"variant": self.variant, "max_age": self.max_age}

    def has_raw(self) -> bool:
        """Return whether age folders with at least one photo are at or below `root`."""
        return any(
            _PHOTO.fullmatch(entry.name)
            for base in self._age_roots()
            for age in folders(base)
            if _AGE.fullmatch(age.name)
            for sex in folders(age)
            for entry in entries(sex)
        )

    def index(self) -> Index:
        """Find all faces.

        Raises:
            DataError: No age folders, or several sets of them of which none is the chosen variant.
        """
        base = self._base()
        found: list[Item | Unused] = []
        for entry in entries(base):
            if entry.name == SYNTHETIC_MARKER:
                continue
            if is_ignored(entry.name):
                found.append(Unused(entry.name, HIDDEN))
            elif not entry.is_dir():
                found.append(Unused(entry.name, "not in an age folder"))
            elif not _AGE.fullmatch(entry.name):
                found.append(Unused(entry.name + "/", "folder name is not an age in whole years"))
            elif self.max_age is not None and int(entry.name) > self.max_age:
                found.append(Unused(entry.name + "/", f"older than max_age={self.max_age}"))
            else:
                found.extend(self._age_folder(Path(entry.path), int(entry.name)))
        items = [entry for entry in found if isinstance(entry, Item)]
        notes, (low, high) = [], AGES[self.variant]
        strange = sorted({int(item.target) for item in items if not low <= item.target <= high})
        if strange:
            hint = "; is this AFAD-Full? Then set dataset.variant=full" if self.variant == "lite" else ""
            seen = some(list(map(str, strange)), 20)
            notes = [f"ages outside {low} to {high} found ({seen}): {VARIANTS[self.variant]} has none{hint}"]
        prefix = base.relative_to(self.root).as_posix()
        if prefix != ".":
            items = [replace(item, path=f"{prefix}/{item.path}") for item in items]
        return Index(items, [entry for entry in found if isinstance(entry, Unused)], notes, {"base": prefix})

    def _age_folder(self, folder: Path, age: int) -> Iterator[Item | Unused]:
        for entry in entries(folder):
            name = f"{folder.name}/{entry.name}"
            if is_ignored(entry.name):
                yield Unused(name, HIDDEN)
            elif entry.name not in SEX_OF_FOLDER or not entry.is_dir():
                yield Unused(name, "not in a folder 111 (male) or 112 (female)")
            else:
                yield from self._sex_folder(Path(entry.path), name, age, SEX_OF_FOLDER[entry.name])

    def _sex_folder(self, folder: Path, prefix: str, age: int, sex: str) -> Iterator[Item | Unused]:
        for entry in entries(folder):
            name = f"{prefix}/{entry.name}"
            photo = _PHOTO.fullmatch(entry.name)
            if is_ignored(entry.name):
                yield Unused(name, HIDDEN)
            elif photo and entry.is_file():
                yield Item(key=name, path=name, target=float(age), group=photo[1], sex=sex)
            else:
                yield Unused(name, "name is not <person>-<k>.jpg")

    def _age_roots(self) -> list[Path]:
        """Return the folders, at most two levels down, that hold age folders; the nearest level only."""
        level = [self.root]
        for _ in range(NESTING + 1):
            found = [folder for folder in level if any(map(_is_age_folder, folders(folder)))]
            if found:
                return found
            level = [inner for folder in level for inner in folders(folder)]
        return []

    def _base(self) -> Path:
        found = self._age_roots()
        if len(found) > 1:
            found = [folder for folder in found if VARIANTS[self.variant] in folder.parts] or found
        if not found:
            raise DataError(self.missing_message())
        if len(found) > 1:
            raise DataError(
                f"dataset {self.name}: several sets of age folders below {self.root}: "
                f"{', '.join(map(str, found))}. Set dataset.root to one of them"
            )
        return found[0]


def _is_age_folder(folder: Path) -> bool:
    return bool(_AGE.fullmatch(folder.name)) and any(inner.name in SEX_OF_FOLDER for inner in folders(folder))
