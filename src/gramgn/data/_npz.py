"""Images that come as arrays in an ``.npz`` file: checked on opening, resized like files."""

from __future__ import annotations

import functools
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gramgn.data._decode import scaled_to_8_bit, to_array, to_channels, to_square
from gramgn.data._types import Decoded, Item
from gramgn.errors import DataError

SUFFIX = "images"
COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}


@functools.lru_cache(maxsize=2)
def _read(path: Path, stamp: int) -> dict[str, NDArray[Any]]:
    """Read all arrays; ``stamp`` makes a changed file another one."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{path}: not a readable .npz file of plain arrays ({error})") from error


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file.

    Raises:
        DataError: Not there, damaged, or pickled objects inside.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return _read(path, path.stat().st_mtime_ns)


def image_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the image arrays of an npz file: those whose name ends in ``images``, else its only array.

    Raises:
        DataError: None, or one that is not uint8 or uint16 ``[N, H, W]`` or ``[N, H, W, 1 | 3 | 4]``.
    """
    arrays = read_npz(path)
    found = {name: array for name, array in sorted(arrays.items()) if name.endswith(SUFFIX)}
    found = found or (arrays if len(arrays) == 1 else {})
    if not found:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "none"
        raise DataError(f"{path}: no array whose name ends in '{SUFFIX}'; arrays found: {shapes}")
    for name, array in found.items():
        grey = array.ndim == 3
        coloured = array.ndim == 4 and array.shape[3] in COLOURS and array.dtype == np.uint8
        if array.dtype not in (np.uint8, np.uint16) or not (grey or coloured) or 0 in array.shape:
            raise DataError(
                f"{path}: array '{name}' is {array.dtype} {array.shape}; images must be uint8 [N, H, W] or "
                f"[N, H, W, 1|3|4], or uint16 [N, H, W]"
            )
    return found


def item_path(file: str, array: str, position: int) -> str:
    """Return the path of one image of an npz file, e.g. ``hands.npz#images/17``."""
    return f"{file}#{array}/{position}"


def image_at(root: Path, path: str) -> tuple[Image.Image, bytes]:
    """Return the image that `item_path` names, and its raw bytes."""
    file, _, inside = path.rpartition("#")
    name, _, position = inside.rpartition("/")
    values = np.ascontiguousarray(read_npz(root / file)[name][int(position)])
    if values.dtype == np.uint16:
        return scaled_to_8_bit(values), values.tobytes()
    return Image.fromarray(values[..., 0] if values.shape[2:] == (1,) else values), values.tobytes()


@dataclass(frozen=True)
class NpzDecoder:
    """Decodes images of an npz file.

    Attributes:
        root: Folder of the npz file.
        size: Side of the result in pixels.
        channels: 1 or 3.
        resize: ``"stretch"``, ``"pad"`` or ``"crop"``.
    """

    root: Path
    size: int
    channels: int
    resize: str
    in_process: bool = True

    def __call__(self, item: Item) -> Decoded:
        """Take the item's image from its array and resize it."""
        image, raw = image_at(self.root, item.path)
        width, height = image.size
        pixels = to_square(to_channels(image, self.channels), self.size, self.resize)
        return Decoded(to_array(pixels), hashlib.sha256(raw).hexdigest(), width, height, image.mode)
