"""Rotation: any images, each turned by a known angle, which is the target; no labels are needed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gramgn.data.dataset import ImageDataset
from gramgn.data.decode import IMAGE_SUFFIXES, Decoder, array_path, image_arrays, to_array, to_square
from gramgn.data.scan import HIDDEN, walk
from gramgn.data.split import hash_share
from gramgn.data.types import Index, Item, Unused
from gramgn.errors import DataError, checked_number, checked_whole

MAX_LOOKED_AT = 20_000
WORK_SCALE = 4
RIM = 1.5
"""Pixels between the disk and the border: what a turned square's edge can reach through the resize filter."""


class Rotation(ImageDataset):
    """Images turned by an angle drawn uniformly from `[-max_angle, max_angle]` degrees, the target.

    Counter-clockwise is positive. Pixels outside the inscribed disk are black, else the corners of the turned
    square would reveal the angle. The angle depends on `angle_seed` and the image's key only.

    Args:
        root: Folder of images (searched at any depth), an `.npz` file with arrays `*images`, or a folder
            with one such file.
        max_angle: Largest angle in degrees, from 0.1 to 180; 45 by default.
        angle_seed: Seed of the angles; 0 by default.
        options: See `ImageDataset`.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    unit: ClassVar[str] = "degrees"
    layout: ClassVar[str] = (
        f"images ({', '.join(IMAGE_SUFFIXES)}) at any depth, or one .npz file with arrays *images"
    )
    source: ClassVar[str] = "any images of your own; no labels are needed"
    augmentations: ClassVar[tuple[str, ...]] = ("crop",)  # a mirror turns the angle's sign around

    def __init__(
        self,
        root: str | Path = "data/raw/rotation",
        *,
        max_angle: float = 45.0,
        angle_seed: int = 0,
        **options: Any,
    ) -> None:
        options.setdefault("name", "rotation")
        super().__init__(root, **options)
        self.max_angle = checked_number("dataset.max_angle", max_angle, minimum=0.1, maximum=180.0)
        self.angle_seed = checked_whole("dataset.angle_seed", angle_seed)
        self._file = ""
        if self.root.suffix.lower() == ".npz":
            self.root, self._file = self.root.parent, self.root.name

    def settings(self) -> dict[str, Any]:
        """Return the options that decide the images."""
        return {"max_angle": self.max_angle, "angle_seed": self.angle_seed, "file": self._file}

    @property
    def stored_channels(self) -> int:
        """1 for grey arrays; a folder may hold colour, so its images are stored as the network sees them."""
        file = self._npz()
        if not file or not (self.root / file).is_file():
            return self.channels
        grey = all(array.shape[3:] in ((), (1,)) for array in image_arrays(self.root / file).values())
        return 1 if grey else self.channels

    def raw_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the npz file, or all files of a folder of images."""
        file = self._npz()
        return iter([(file, self.root / file)]) if file else super().raw_files()

    def has_raw(self) -> bool:
        """Return whether an image or the npz file is there."""
        file = self._npz()
        if file:
            return (self.root / file).is_file()
        return any(
            _is_image(path) and not ignored for _, path, ignored in islice(walk(self.root), MAX_LOOKED_AT)
        )

    def decoder(self, size: int) -> RotationDecoder:
        """Return a decoder that turns an image by its target."""
        return RotationDecoder(self.root, size, self.stored_channels, self.resize, self.grey_range)

    def index(self) -> Index:
        """List the images and draw their angles.

        Raises:
            DataError: Neither images nor a readable npz file.
        """
        file = self._npz()
        if file:
            return Index(
                [
                    self._item(f"{name}-{i:06d}", array_path(file, name, i))
                    for name, array in image_arrays(self.root / file).items()
                    for i in range(len(array))
                ]
            )
        found = Index([])
        for relative, path, ignored in walk(self.root):
            if ignored:
                found.unused.append(Unused(relative, HIDDEN))
            elif not _is_image(path):
                found.unused.append(Unused(relative, "not an image by its name"))
            else:
                found.items.append(self._item(unicodedata.normalize("NFC", relative), relative))
        return found

    def _npz(self) -> str:
        """Return the npz file's name: the given one, or the only one in a folder without images."""
        if self._file or not self.root.is_dir():
            return self._file
        names = [path.name for path in sorted(self.root.iterdir()) if path.is_file()]
        files = [name for name in names if name.lower().endswith(".npz")]
        if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names) or not files:
            return ""
        if len(files) > 1:
            raise DataError(
                f"several .npz files in {self.root}: set dataset.root to one of {', '.join(files)}"
            )
        return files[0]

    def _item(self, key: str, path: str) -> Item:
        share = hash_share(f"angle:{self.angle_seed}:{key}")
        return Item(key, path, round((2.0 * share - 1.0) * self.max_angle, 6))


class RotationDecoder(Decoder):
    """Turns images by their target and masks them to the inscribed disk."""

    def square(self, image: Image.Image, item: Item) -> tuple[NDArray[np.uint8], str]:
        """Make the image square, turn it, scale it down, mask it."""
        # Turning at the final resolution would blur the image more, the larger the angle.
        side = max(self.size, min(min(image.size), WORK_SCALE * self.size))
        turned = to_square(image, side, self.resize).rotate(item.target, Image.Resampling.BILINEAR)
        pixels = to_array(to_square(turned, self.size, "stretch"))
        offset = np.arange(self.size) - (self.size - 1) / 2
        disk = np.hypot(offset[:, None], offset[None, :]) <= self.size / 2 - RIM
        return pixels * disk.astype(np.uint8), f"turned by {item.target:g} degrees, masked to the disk"


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES
