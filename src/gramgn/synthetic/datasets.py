"""The synthetic data sets: drawn on first use in the real layout, then read by the code of the real ones."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from gramgn.data import AFAD, RSNA, ImageDataset
from gramgn.errors import ConfigError, checked_choice, checked_number, checked_whole, is_whole
from gramgn.synthetic.recipes import face_recipe, hand_recipe
from gramgn.synthetic.store import Recipe, generate, matches

VERSION = 1
"""Increased whenever the same seed would give other bytes."""

DEFAULT_NUM_IMAGES = 2560
MAX_NUM_IMAGES = 500_000


class SyntheticDataset(ImageDataset):
    """What the synthetic sets share: the place, the marker, and drawing instead of asking for a download.

    A subclass sets `noise_sd`, the noise of the labels, before it calls this constructor.
    """

    source: ClassVar[str] = "drawn by this project on first use"
    generator: ClassVar[str]
    full: ClassVar[int]
    """Number of images of the real set."""
    noise: ClassVar[tuple[str, float]]
    """Name and default of the option for the noise of the labels."""
    noise_sd: float

    def __init__(
        self, root: str | Path, *, num_images: int | str = DEFAULT_NUM_IMAGES, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(root, **{"name": self.generator, **options})
        if num_images != "full" and not is_whole(num_images, 1, MAX_NUM_IMAGES):
            raise ConfigError(
                f"dataset.num_images={num_images}: must be a whole number from 1 to {MAX_NUM_IMAGES:,}, "
                f"or full ({self.full:,}, as many as the real set)"
            )
        num_images = self.full if num_images == "full" else int(num_images)
        seed = checked_whole("dataset.seed", seed, maximum=2**63 - 1)
        name, default = self.noise
        self.drawn_with: dict[str, Any] = {"num_images": num_images, "seed": seed, name: self.noise_sd}
        self.base = self.root
        suffix = "" if self.noise_sd == default else f"-sd{self.noise_sd!r}"
        self.root /= f"n{num_images}-seed{seed}{suffix}"

    @abstractmethod
    def recipe(self) -> Recipe:
        """Return the content of the set."""

    def marker(self) -> dict[str, Any]:
        """Return the content of `synthetic.json`: all that decides the bytes."""
        about = {"kind": "synthetic", "generator": self.generator, "version": VERSION}
        return {**about, **self.drawn_with}

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which pictures are used and how they are drawn."""
        return {**super().settings(), "stand_in": self.marker()}

    def check_raw(self) -> None:
        """Raise DataError only where the folder holds something else; what is missing will be drawn."""
        matches(self.root, self.marker())

    def ensure_raw(self) -> None:
        """Draw the set if it is not there."""
        generate(self.name, self.root, self.marker(), self.recipe(), self.workers)

    def command(self, image_size: int) -> str:
        """Return the command line that draws and prepares this data set."""
        options = {f"dataset.{key}": value for key, value in {"root": self.base, **self.drawn_with}.items()}
        return self._command(options, image_size)


class RSNASynthetic(SyntheticDataset, RSNA):
    """Procedural hand radiographs in the names and layout of the RSNA Bone Age set (Kaggle's distribution).

    Bones ossify, grow and fuse as the anatomy table says; the size of the hand carries no information. Drawn in
    `<root>/n<num_images>-seed<seed>` on first use. Everything made from it is called synthetic.

    Args:
        root: Folder below which sets of this kind are drawn.
        reader_sd: Standard deviation in months of a reader's error, added to the labels; 0 by default, 6 is realistic.
        num_images: Number of radiographs, 2560 by default; `"full"` for 12,611, as many as the real training set.
        seed: Same seed, same bytes (with the same numpy and Pillow); 0 by default.
        options: See `gramgn.data.RSNA`; there is no official test set here.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    generator: ClassVar[str] = "rsna_synthetic"
    full: ClassVar[int] = 12_611
    noise: ClassVar[tuple[str, float]] = ("reader_sd", 0.0)

    def __init__(
        self, root: str | Path = "data/raw/rsna_synthetic", *, reader_sd: float = 0.0, **options: Any
    ) -> None:
        self.noise_sd = checked_number("dataset.reader_sd", reader_sd, minimum=0.0, maximum=60.0)
        super().__init__(root, **options)

    def recipe(self) -> Recipe:
        """Return the content of the set."""
        return hand_recipe(**self.drawn_with)


class AFADSynthetic(SyntheticDataset, AFAD):
    """Procedural cartoon faces of 18 to 39 years in the names and layout of AFAD-Lite.

    Each person looks older or younger than they are by a fixed, normally distributed number of years. That
    sets a floor to what can be inferred (for 5 years, a mean absolute error of about 3 years, as on the real
    set) while a network can still memorise the training faces. Drawn in
    `<root>/n<num_images>-seed<seed>` on first use. Everything made from it is called synthetic.

    Args:
        root: Folder below which sets of this kind are drawn.
        apparent_age_sd: Standard deviation in years of a person's apparent minus real age; 5 by default.
        num_images: Number of photos, 2560 by default; `"full"` for 59,344, as many as AFAD-Lite.
        seed: Same seed, same bytes (with the same numpy and Pillow); 0 by default.
        options: See `gramgn.data.AFAD`; `variant` can only be `"lite"`.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    generator: ClassVar[str] = "afad_synthetic"
    full: ClassVar[int] = 59_344
    noise: ClassVar[tuple[str, float]] = ("apparent_age_sd", 5.0)

    def __init__(
        self, root: str | Path = "data/raw/afad_synthetic", *, apparent_age_sd: float = 5.0, **options: Any
    ) -> None:
        self.noise_sd = checked_number("dataset.apparent_age_sd", apparent_age_sd, minimum=0.0, maximum=20.0)
        super().__init__(root, **options)
        checked_choice("dataset.variant", self.variant, ("lite",))

    def recipe(self) -> Recipe:
        """Return the content of the set."""
        return face_recipe(**self.drawn_with)
