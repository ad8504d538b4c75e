"""The synthetic data sets: drawn on first use in the real layout, then read by the code of the real ones."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from gramgn.data import AFAD, RSNA, ImageDataset, prepare_command
from gramgn.errors import ConfigError, checked_choice, checked_number, checked_whole, is_whole
from gramgn.synthetic.recipes import face_recipe, hand_recipe
from gramgn.synthetic.store import Recipe, generate, matches

VERSION = 1
"""Increased whenever the same seed would give other bytes."""

DEFAULT_NUM_IMAGES = 2560
MAX_NUM_IMAGES = 500_000
APPARENT_AGE_SD, READER_SD = 5.0, 0.0


class SyntheticDataset(ImageDataset):
    """What the synthetic sets share: the place, the marker, and drawing instead of asking for a download.

    A subclass sets its noise before it calls this constructor.

    Attributes:
        base: Folder below which sets of one kind lie, each in `n<num_images>-seed<seed>`.
        num_images: Number of pictures.
        seed: Seed of the set.
    """

    source: ClassVar[str] = "drawn by this project on first use"
    generator: ClassVar[str]
    full: ClassVar[int]
    """Number of images of the real set."""
    noise: ClassVar[tuple[str, float]]
    """Name and default of the option for the noise of the labels."""

    def __init__(self, root: str | Path, *, num_images: int | str, seed: int, **options: Any) -> None:
        super().__init__(root, **{"name": self.generator, **options})
        self.base = self.root
        self.num_images = self._checked_number(num_images)
        self.seed = checked_whole("dataset.seed", seed, maximum=2**63 - 1)
        name, default = self.noise
        sd = getattr(self, name)
        self.root /= f"n{self.num_images}-seed{seed}" + ("" if sd == default else f"-sd{sd!r}")

    @abstractmethod
    def recipe(self) -> Recipe[Any]:
        """Return the content of the set."""

    def drawn_with(self) -> dict[str, float]:
        """Return the options that decide the files, in addition to number and seed."""
        name, _ = self.noise
        return {name: getattr(self, name)}

    def marker(self) -> dict[str, Any]:
        """Return the content of `synthetic.json`: all that decides the bytes."""
        about = {"kind": "synthetic", "generator": self.generator, "version": VERSION}
        return {**about, "num_images": self.num_images, "seed": self.seed, **self.drawn_with()}

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which pictures are used and how they are drawn."""
        return {**super().settings(), "stand_in": self.marker()}

    def check_raw(self) -> None:
        """Raise DataError only where the folder holds something else; what is missing will be drawn."""
        matches(self.root, self.marker())

    def ensure_raw(self) -> None:
        """Draw the set if it is not there."""
        generate(self.name, self.root, self.recipe(), self.workers)

    def command(self, image_size: int) -> str:
        """Return the command line that draws and prepares this data set."""
        options = {"root": self.base, "num_images": self.num_images, "seed": self.seed, **self.drawn_with()}
        overrides: dict[str, object] = {f"dataset.{key}": value for key, value in options.items()}
        return prepare_command(self.name, {**overrides, "image_size": image_size})

    def _checked_number(self, given: int | str) -> int:
        """Return the number of images, `"full"` resolved; raise ConfigError for anything else."""
        if given == "full":
            return self.full
        if isinstance(given, str) or not is_whole(given, 1, MAX_NUM_IMAGES):
            raise ConfigError(
                f"dataset.num_images={given}: must be a whole number from 1 to {MAX_NUM_IMAGES:,}, "
                f"or full ({self.full:,}, as many as the real set)"
            )
        return given


class RSNASynthetic(SyntheticDataset, RSNA):
    """Procedural hand radiographs in the names and layout of the RSNA Bone Age set (Kaggle's distribution).

    Bones ossify, grow and fuse as the anatomy table says; the size of the hand carries no information. Drawn in
    `<root>/n<num_images>-seed<seed>` on first use. Everything made from it is called synthetic.

    Args:
        root: Folder below which sets of this kind are drawn.
        num_images: Number of radiographs; `"full"` for 12,611, as many as the real training set.
        seed: Same seed, same bytes (with the same numpy and Pillow).
        reader_sd: Standard deviation in months of a reader's error, added to the labels; 6 is realistic.
        options: See `gramgn.data.RSNA`; there is no official test set here.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    generator: ClassVar[str] = "rsna_synthetic"
    full: ClassVar[int] = 12_611
    noise: ClassVar[tuple[str, float]] = ("reader_sd", READER_SD)

    def __init__(
        self,
        root: str | Path = "data/raw/rsna_synthetic",
        *,
        num_images: int | str = DEFAULT_NUM_IMAGES,
        seed: int = 0,
        reader_sd: float = READER_SD,
        **options: Any,
    ) -> None:
        self.reader_sd = checked_number("dataset.reader_sd", reader_sd, minimum=0.0, maximum=60.0)
        super().__init__(root, num_images=num_images, seed=seed, **options)

    def recipe(self) -> Recipe[Any]:
        """Return the content of the set."""
        return hand_recipe(self.num_images, self.seed, self.reader_sd, self.marker())


class AFADSynthetic(SyntheticDataset, AFAD):
    """Procedural cartoon faces of 18 to 39 years in the names and layout of AFAD-Lite.

    Each person looks older or younger than they are by a fixed, normally distributed number of years. That
    sets a floor to what can be inferred (for 5 years, a mean absolute error of about 3 years, as on the real
    set) while a network can still memorise the training faces. Drawn in
    `<root>/n<num_images>-seed<seed>` on first use. Everything made from it is called synthetic.

    Args:
        root: Folder below which sets of this kind are drawn.
        num_images: Number of photos; `"full"` for 59,344, as many as AFAD-Lite.
        seed: Same seed, same bytes (with the same numpy and Pillow).
        apparent_age_sd: Standard deviation in years of a person's apparent minus real age.
        options: See `gramgn.data.AFAD`; `variant` can only be `"lite"`.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    generator: ClassVar[str] = "afad_synthetic"
    full: ClassVar[int] = 59_344
    noise: ClassVar[tuple[str, float]] = ("apparent_age_sd", APPARENT_AGE_SD)

    def __init__(
        self,
        root: str | Path = "data/raw/afad_synthetic",
        *,
        num_images: int | str = DEFAULT_NUM_IMAGES,
        seed: int = 0,
        apparent_age_sd: float = APPARENT_AGE_SD,
        **options: Any,
    ) -> None:
        self.apparent_age_sd = checked_number(
            "dataset.apparent_age_sd", apparent_age_sd, minimum=0.0, maximum=20.0
        )
        super().__init__(root, num_images=num_images, seed=seed, **options)
        checked_choice("dataset.variant", self.variant, ("lite",))

    def recipe(self) -> Recipe[Any]:
        """Return the content of the set."""
        return face_recipe(self.num_images, self.seed, self.apparent_age_sd, self.marker())
