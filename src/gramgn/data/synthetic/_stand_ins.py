"""The two stand-ins as data sets: drawn on first use in the real layout, then read by the real code."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Unpack

from gramgn.data import _check
from gramgn.data._afad import AFAD
from gramgn.data._dataset import ImageDataset
from gramgn.data._rsna import RSNA
from gramgn.data._types import DatasetOptions
from gramgn.data.synthetic._recipes import face_recipe, hand_recipe
from gramgn.data.synthetic._store import Recipe, generate, matches
from gramgn.errors import ConfigError

VERSION = 1
"""Raised whenever the same seed would give other bytes."""

DEFAULT_NUM_IMAGES = 2560
MAX_NUM_IMAGES = 500_000
APPARENT_AGE_SD, READER_SD = 5.0, 0.0


class StandIn(ImageDataset):
    """What the stand-ins share: the place, the marker, and drawing instead of asking for a download.

    Attributes:
        base: Folder under which stand-ins of one kind lie, each in ``n<num_images>-seed<seed>``.
        num_images: How many pictures.
        seed: Seed of the set.
    """

    source: ClassVar[str] = "drawn by this project on first use"
    generator: ClassVar[str]
    full: ClassVar[int]
    """Number of images of the real set."""
    base: Path
    num_images: int
    seed: int

    @abstractmethod
    def drawn_with(self) -> dict[str, float]:
        """Return the options that decide the files beside number and seed."""

    @abstractmethod
    def recipe(self) -> Recipe[Any]:
        """Return what the stand-in consists of."""

    def marker(self) -> dict[str, Any]:
        """Return the content of ``synthetic.json``: all that decides the bytes."""
        about = {"kind": "synthetic", "generator": self.generator, "version": VERSION}
        return {**about, "num_images": self.num_images, "seed": self.seed, **self.drawn_with()}

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which pictures are used and how they are drawn."""
        return {**super().settings(), "stand_in": self.marker()}

    def check_raw(self) -> None:
        """Raise DataError only where the folder holds something else; what is missing will be drawn."""
        matches(self.root, self.marker())

    def ensure_raw(self) -> None:
        """Draw the pictures that are not there."""
        generate(self.name, self.root, self.recipe(), self.workers)

    def command(self, image_size: int) -> str:
        """Return the command line that draws and prepares this data set."""
        options: dict[str, Any] = {"root": self.base, "num_images": self.num_images, "seed": self.seed}
        words = [f"dataset.{key}={value}" for key, value in {**options, **self.drawn_with()}.items()]
        words = [f"'{word}'" if " " in word else word for word in [*words, f"image_size={image_size}"]]
        return f"python scripts/prepare_data.py dataset={self.name} {' '.join(words)}"

    @classmethod
    def checked_number(cls, given: int | str) -> int:
        """Return the number of images, ``"full"`` resolved; raise ConfigError for anything else."""
        if given == "full":
            return cls.full
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MAX_NUM_IMAGES:
            raise ConfigError(
                f"dataset.num_images={given}: must be a whole number from 1 to {MAX_NUM_IMAGES:,}, "
                f"or full ({cls.full:,}, as many as the real set)"
            )
        return given

    @classmethod
    def checked_seed(cls, given: int) -> int:
        """Return the seed; raise ConfigError unless it is a whole number that is not negative."""
        return _check.integer("dataset.seed", given, maximum=2**63 - 1)


class RSNASynthetic(StandIn, RSNA):
    """Procedural hand radiographs in the names and layout of the RSNA Bone Age set (Kaggle's distribution).

    Bones ossify, grow and fuse as the anatomy table says; the size of the hand tells nothing. Drawn in
    ``<root>/n<num_images>-seed<seed>`` on first use. Everything made from it is called synthetic.

    Args:
        root: Folder under which stand-ins of this kind are drawn.
        num_images: How many radiographs; ``"full"`` for 12,611, as many as the real training set.
        seed: Same seed, same bytes (with the same numpy and Pillow).
        reader_sd: Standard deviation in months of a reader's error, added to the labels; 6 is realistic.
        test_from: See `gramgn.data.RSNA`; there is no official test set here.
        max_unmatched: See `gramgn.data.RSNA`.
        options: See `gramgn.data.ImageDataset`.

    Raises:
        ConfigError: An option or a value that is not known.
    """

    generator: ClassVar[str] = "rsna_synthetic"
    full: ClassVar[int] = 12_611

    def __init__(
        self,
        root: str | Path = "data/raw/rsna_synthetic",
        *,
        num_images: int | str = DEFAULT_NUM_IMAGES,
        seed: int = 0,
        reader_sd: float = READER_SD,
        test_from: str = "auto",
        max_unmatched: float = 0.01,
        **options: Unpack[DatasetOptions],
    ) -> None:
        options.setdefault("name", self.generator)
        self.base = _check.folder_path("root", root)
        self.num_images, self.seed = self.checked_number(num_images), self.checked_seed(seed)
        self.reader_sd = _check.number("reader_sd", reader_sd, minimum=0.0, maximum=60.0)
        folder = self.base / _folder_name(self.num_images, self.seed, self.reader_sd, READER_SD)
        RSNA.__init__(self, folder, test_from=test_from, max_unmatched=max_unmatched, **options)

    def drawn_with(self) -> dict[str, float]:
        """Return the options that decide the files beside number and seed."""
        return {"reader_sd": self.reader_sd}

    def recipe(self) -> Recipe[Any]:
        """Return what the stand-in consists of."""
        return hand_recipe(self.num_images, self.seed, self.reader_sd, self.marker())


class AFADSynthetic(StandIn, AFAD):
    """Procedural cartoon faces of 18 to 39 years in the names and layout of AFAD-Lite.

    Each person looks older or younger than they are by a fixed, normally distributed number of years. That
    sets a floor to what can be inferred (for 5 years, a mean absolute error of about 3 years, as on the real
    set) while a network can still learn the training faces by heart. Drawn in
    ``<root>/n<num_images>-seed<seed>`` on first use. Everything made from it is called synthetic.

    Args:
        root: Folder under which stand-ins of this kind are drawn.
        num_images: How many photos; ``"full"`` for 59,344, as many as AFAD-Lite.
        seed: Same seed, same bytes (with the same numpy and Pillow).
        apparent_age_sd: Standard deviation in years of a person's apparent minus real age.
        variant: Always ``"lite"``, the set that these faces stand in for.
        max_age: Leave out older faces; no bound if None.
        options: See `gramgn.data.ImageDataset`.

    Raises:
        ConfigError: An option or a value that is not known.
    """

    generator: ClassVar[str] = "afad_synthetic"
    full: ClassVar[int] = 59_344

    def __init__(
        self,
        root: str | Path = "data/raw/afad_synthetic",
        *,
        num_images: int | str = DEFAULT_NUM_IMAGES,
        seed: int = 0,
        apparent_age_sd: float = APPARENT_AGE_SD,
        variant: str = "lite",
        max_age: int | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        options.setdefault("name", self.generator)
        self.base = _check.folder_path("root", root)
        self.num_images, self.seed = self.checked_number(num_images), self.checked_seed(seed)
        self.apparent_age_sd = _check.number("apparent_age_sd", apparent_age_sd, minimum=0.0, maximum=20.0)
        folder = self.base / _folder_name(self.num_images, self.seed, self.apparent_age_sd, APPARENT_AGE_SD)
        variant = _check.choice("variant", variant, ("lite",))
        AFAD.__init__(self, folder, variant=variant, max_age=max_age, **options)

    def drawn_with(self) -> dict[str, float]:
        """Return the options that decide the files beside number and seed."""
        return {"apparent_age_sd": self.apparent_age_sd}

    def recipe(self) -> Recipe[Any]:
        """Return what the stand-in consists of."""
        return face_recipe(self.num_images, self.seed, self.apparent_age_sd, self.marker())


def _folder_name(num_images: int, seed: int, sd: float, default_sd: float) -> str:
    """Return the folder of a set; the noise stands in it where it is not the default."""
    return f"n{num_images}-seed{seed}" + ("" if sd == default_sd else f"-sd{sd!r}")
