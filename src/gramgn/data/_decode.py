"""The one way from an image file to pixels: read, turn upright, convert, resize with antialiasing.

Pixels come out as uint8 ``[C, H, W]`` with ``C`` 1 or 3. Grey is Pillow's ``L``; transparent parts are laid
on black; 16-bit grey is scaled by its full range of 65,535.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from gramgn.data._types import Decoded, Item
from gramgn.errors import DataError

RESIZE_MODES = ("stretch", "pad", "crop")
MAX_PIXELS = 64_000_000
"""Largest image that is decoded: 8,000 x 8,000. RSNA's largest has 9 million. A worker's peak memory is about
four bytes a pixel plus the file."""

HALVE_FROM_SCALE = 16

_PLAIN = ("1", "L", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_WITH_ALPHA = ("LA", "La", "PA", "P", "RGBA", "RGBa")
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
_DEEP_FORMATS = ("PNG", "PPM")
_DEEP_MAX = 65_535


class Decoder(Protocol):
    """Turns an item into pixels; picklable, so that it can be sent to worker processes once."""

    @property
    def in_process(self) -> bool:
        """True where the data is one array in memory and worker processes would only copy it."""
        ...

    def __call__(self, item: Item) -> Decoded:
        """Return the decoded sample, or raise DataError naming the file."""
        ...


@dataclass(frozen=True)
class FileDecoder:
    """Decodes image files below a root.

    Attributes:
        root: Folder that item paths are relative to.
        size: Side of the result in pixels.
        channels: 1 or 3.
        resize: ``"stretch"``, ``"pad"`` or ``"crop"``.
    """

    root: Path
    size: int
    channels: int
    resize: str
    in_process: bool = False

    def __call__(self, item: Item) -> Decoded:
        """Read, hash, decode and resize the item's file."""
        path = self.root / item.path
        raw = read_bytes(path)
        digest = hashlib.sha256(raw).hexdigest()
        image, mode, note = open_image(path, raw)
        width, height = image.size
        pixels = to_square(to_channels(image, self.channels), self.size, self.resize)
        return Decoded(to_array(pixels), digest, width, height, mode, note)


def load_image(
    path: str | Path, size: int, *, resize: str = "stretch", channels: int = 3
) -> NDArray[np.uint8]:
    """Load one image file as it is prepared for training.

    Args:
        path: The file.
        size: Side of the result in pixels.
        resize: ``"stretch"``, ``"pad"`` or ``"crop"``.
        channels: 1 or 3.

    Returns:
        uint8 ``[C, size, size]``.

    Raises:
        DataError: The file cannot be read or decoded, is too large, or has an unsupported pixel format.
    """
    path = Path(path)
    return FileDecoder(path.parent, size, channels, resize)(Item(path.name, path.name, 0.0)).pixels


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes; raise DataError naming it where that fails or it is empty."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not raw:
        raise DataError(f"{path}: the file is empty")
    return raw


def open_image(path: Path, raw: bytes) -> tuple[Image.Image, str, str]:
    """Decode an image fully and turn it upright.

    Args:
        path: The file, for messages.
        raw: Its bytes.

    Returns:
        The image, Pillow's name of its pixel format, and a note on what the decoder complained about.

    Raises:
        DataError: Not an image, damaged, too large, or of an unsupported pixel format.
    """
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            image: Image.Image = Image.open(io.BytesIO(raw))
            _check_size(path, *image.size)
            if image.mode not in (*_PLAIN, *_WITH_ALPHA, *_DEEP) and not _is_deep(image):
                raise DataError(
                    f"{path}: pixel format {image.mode} is not supported; convert it to 8 or 16-bit grey or "
                    f"8-bit RGB"
                )
            image.load()
            mode, is_deep = image.mode, _is_deep(image)
            ImageOps.exif_transpose(image, in_place=True)
            image = scaled_to_8_bit(np.asarray(image)) if is_deep else image
        except DataError:
            raise
        except Image.DecompressionBombError as error:
            raise DataError(f"{path}: larger than the limit of {MAX_PIXELS:,} pixels") from error
        except UnidentifiedImageError as error:
            raise DataError(f"{path}: not an image ({_first_bytes(raw)})") from error
        except (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error) as error:
            # Pillow's plugins raise all of these on damaged files.
            raise DataError(f"{path}: damaged or incomplete image ({error})") from error
    # Deprecations are about Pillow's callers, not about the file.
    about_file = [
        str(entry.message) for entry in complaints if not issubclass(entry.category, DeprecationWarning)
    ]
    note = "; ".join(sorted({text.splitlines()[0].strip() for text in about_file if text}))
    return image, mode, note


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert to ``L`` (1 channel) or ``RGB`` (3 channels), transparent parts laid on black."""
    target = "L" if channels == 1 else "RGB"
    if image.mode in _WITH_ALPHA and (image.mode != "P" or "transparency" in image.info):
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(ground, image)
    return image if image.mode == target else image.convert(target)


def to_square(image: Image.Image, size: int, resize: str) -> Image.Image:
    """Resize to ``size`` x ``size`` with Pillow's antialiased bilinear filter, by the one routine for all."""
    width, height = image.size
    if resize == "stretch":
        return _resized(image, (size, size), (0, 0, width, height))
    if resize == "crop":
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return _resized(image, (size, size), (left, top, left + side, top + side))
    scale = size / max(width, height)
    inner = (max(1, round(width * scale)), max(1, round(height * scale)))
    square = Image.new(image.mode, (size, size))
    fitted = _resized(image, inner, (0, 0, width, height))
    square.paste(fitted, ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return square


def _resized(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    """Resize the part ``box`` of an image, averaging 2 x 2 pixels first where the scale is large.

    Halving first makes a radiograph twice as fast to resize and moves no pixel by more than one level of 255.
    """
    scale = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    if scale >= HALVE_FROM_SCALE:
        image, box = image.reduce(2), (box[0] / 2, box[1] / 2, box[2] / 2, box[3] / 2)
    return image.resize(size, Image.Resampling.BILINEAR, box=box)


def to_array(image: Image.Image) -> NDArray[np.uint8]:
    """Return an ``L`` or ``RGB`` image as uint8 ``[C, H, W]``."""
    pixels = np.asarray(image, dtype=np.uint8)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _check_size(path: Path, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{path}: {width} x {height} is above the limit of {MAX_PIXELS:,} pixels; scale the file down"
        )


def _is_deep(image: Image.Image) -> bool:
    """Say whether grey values go to 65,535: 16-bit modes, and mode I where the format defines that range."""
    return image.mode in _DEEP or (image.mode == "I" and image.format in _DEEP_FORMATS)


def scaled_to_8_bit(values: NDArray[Any]) -> Image.Image:
    """Scale 16-bit grey ``[H, W]`` to ``L``; Pillow's own conversion would clip all above 255 to white."""
    wide = values.astype(np.uint32)
    return Image.fromarray(((wide * 255 + _DEEP_MAX // 2) // _DEEP_MAX).astype(np.uint8))


def _first_bytes(raw: bytes) -> str:
    head = raw[:16].decode("ascii", errors="replace").strip()
    return f"{len(raw)} bytes, beginning with {head!r}"
