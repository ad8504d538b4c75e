"""Decoding: an image file, or an image in an `.npz` file, is read, turned upright, converted and resized.

Pixels are uint8 `[C, H, W]` with `C` 1 or 3. Grey is Pillow's `L`; transparent parts are laid on black; 16-bit grey is
scaled by its full range of 65,535 or by a given one. Pillow resizes with antialiasing; `torchvision.transforms.v2`
returns the same bytes on the same images, but importing it would cost each worker process several seconds and 780 MB.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from gramgn.data.scan import read_bytes
from gramgn.data.types import Decoded, Item
from gramgn.errors import DataError

RESIZE_MODES = ("stretch", "pad", "crop")
IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif"),
    *(".tif", ".tiff", ".webp", ".pgm", ".ppm"),
)
MAX_PIXELS = 64_000_000
"""Largest image that is decoded: 8,000 x 8,000. RSNA's largest has 9 million. A worker's peak memory is about
four bytes per pixel plus the file."""

HALVE_FROM_SCALE = 16
ARRAY_SUFFIX = "images"
COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}

_PLAIN = ("1", "L", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_WITH_ALPHA = ("LA", "La", "PA", "P", "RGBA", "RGBa")
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
_DEEP_FORMATS = ("PNG", "PPM")
DEEP_MAX = 65_535
"""Largest value of 16-bit grey."""
DEEP_COLOUR = "16-bit colour reduced to 8 bits"
COLOUR_LEVEL = 257
"""16-bit values per level of 8 bits."""
FRAMES = re.compile(r"the first of \d+ frames")
_PNG_HEAD = b"\x89PNG\r\n\x1a\n"
# What Pillow's plugins raise on damaged files and metadata.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error)

Decode = Callable[[Item], Decoded]
"""Turns an item into pixels, or raises DataError naming the file; picklable, as it is sent to worker processes."""


@dataclass(frozen=True)
class Decoder:
    """Decodes image files, and images in `.npz` files, below a root folder.

    Attributes:
        root: Folder that item paths are relative to.
        size: Side of the result in pixels.
        channels: 1 or 3.
        resize: `"stretch"`, `"pad"` or `"crop"`.
        grey_range: The values of 16-bit grey that become black and white; 0 and 65,535 if None (the default).
    """

    root: Path
    size: int
    channels: int
    resize: str
    grey_range: tuple[int, int] | None = None

    def __call__(self, item: Item) -> Decoded:
        """Read, hash, decode and resize the item's image."""
        raw, source, mode, note = _read_image(self.root, item.path)
        if isinstance(source, Image.Image):
            image = source
            brightest = (
                int(np.asarray(image.convert("RGB")).max()) * COLOUR_LEVEL if DEEP_COLOUR in note else 0
            )
        else:
            image, brightest = _scaled_to_8_bit(source, self.grey_range), int(source.max())
        pixels, done = self.square(to_channels(image, self.channels), item)
        note = "; ".join(part for part in (note, done) if part)
        return Decoded(
            pixels, hashlib.sha256(raw).hexdigest(), image.width, image.height, mode, note, brightest
        )

    def square(self, image: Image.Image, item: Item) -> tuple[NDArray[np.uint8], str]:
        """Return the pixels `[C, size, size]` of an upright image, and a note on anything else that was done."""
        return to_array(to_square(image, self.size, self.resize)), ""


def load_image(
    path: str | Path,
    size: int,
    *,
    resize: str = "stretch",
    channels: int = 3,
    grey_range: tuple[int, int] | None = None,
) -> NDArray[np.uint8]:
    """Load one image file as it is prepared for training.

    Args:
        path: The file.
        size: Side of the result in pixels.
        resize: `"stretch"` (the default), `"pad"` or `"crop"`.
        channels: 1 or 3 (the default).
        grey_range: See `Decoder`.

    Returns:
        uint8 `[C, size, size]`.

    Raises:
        DataError: The file cannot be read or decoded, is too large, or has an unsupported pixel format.
    """
    path = Path(path)
    return Decoder(path.parent, size, channels, resize, grey_range)(Item(path.name, path.name, 0.0)).pixels


def array_path(file: str, array: str, position: int) -> str:
    """Return the path of one image of an npz file, e.g. `hands.npz#images/17`."""
    return f"{file}#{array}/{position}"


def file_of(path: str) -> str:
    """Return the file that an item's path lies in: many items of an npz file share one."""
    before, inside, _ = path.partition(".npz#")
    return f"{before}.npz" if inside else path


def _read_image(root: Path, path: str) -> tuple[bytes, Image.Image | NDArray[Any], str, str]:
    """Return raw bytes, the upright image, Pillow's name of its pixel format, and the decoder's warnings.

    16-bit grey is returned as its values `[H, W]`.
    """
    file = file_of(path)
    if file == path:
        raw = read_bytes(root / path)
        return raw, *_open_image(root / path, raw)
    name, _, position = path.removeprefix(f"{file}#").rpartition("/")
    values = np.ascontiguousarray(read_npz(root / file)[name][int(position)])
    if values.dtype == np.uint16:
        return values.tobytes(), values, "L", ""
    image = Image.fromarray(values[..., 0] if values.shape[2:] == (1,) else values)
    return values.tobytes(), image, image.mode, ""


def _open_image(path: Path, raw: bytes) -> tuple[Image.Image | NDArray[Any], str, str]:
    """Decode an image fully and turn it upright; raise DataError naming the file if that fails."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            image, note = _decoded(path, raw)
        except DataError:
            raise
        except Image.DecompressionBombError as error:
            raise DataError(f"{path}: larger than the limit of {MAX_PIXELS:,} pixels") from error
        except _DAMAGE as error:
            try:
                image, note = _decoded(path, _bare_png(raw))
                note = "; ".join(filter(None, (note, "metadata that cannot be read left out")))
            except _DAMAGE:
                why = f"damaged or incomplete image ({error})"
                if isinstance(error, UnidentifiedImageError):
                    head = raw[:16].decode("ascii", errors="replace").strip()
                    why = f"not an image ({len(raw)} bytes, beginning with {head!r})"
                raise DataError(f"{path}: {why}") from error
        # Mode I is 16-bit grey only where the file format defines that range.
        is_deep = image.mode in _DEEP or (image.mode == "I" and image.format in _DEEP_FORMATS)
        try:
            ImageOps.exif_transpose(image, in_place=True)
        except _DAMAGE as error:
            note = "; ".join(filter(None, (note, f"Corrupt EXIF data: {error}")))
    # Deprecation warnings concern Pillow's callers, not the file.
    about_file = [
        str(each.message) for each in complaints if not issubclass(each.category, DeprecationWarning)
    ]
    note = "; ".join(sorted({text.splitlines()[0].strip() for text in (*about_file, note) if text}))
    if not is_deep:
        return image, image.mode, note
    values = np.asarray(image)
    hidden = image.info.get("transparency")
    return (values if hidden is None else np.where(values == hidden, 0, values)), image.mode, note


def _decoded(path: Path, raw: bytes) -> tuple[Image.Image, str]:
    """Decode an image fully; return it with a note on what is lost.

    Raises:
        DataError: It is too large or has an unsupported pixel format.
    """
    image = Image.open(io.BytesIO(raw))
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{path}: {width} x {height} is above the limit of {MAX_PIXELS:,} pixels; scale the file down"
        )
    is_deep = image.mode in _DEEP or (image.mode == "I" and image.format in _DEEP_FORMATS)
    if not is_deep and image.mode not in (*_PLAIN, *_WITH_ALPHA):
        raise DataError(
            f"{path}: pixel format {image.mode} is not supported; convert it to 8 or 16-bit grey or 8-bit RGB"
        )
    lost = []
    if not is_deep and ";16" in str(image.tile):
        lost.append(DEEP_COLOUR)
    if image.format != "MPO":  # a photograph, with small copies of it
        with contextlib.suppress(*_DAMAGE):  # only the other frames are damaged
            num_frames = getattr(image, "n_frames", 1)
            lost += [f"the first of {num_frames} frames"] * (num_frames > 1)
    image.load()
    return image, "; ".join(lost)


def _bare_png(raw: bytes) -> bytes:
    """Return a PNG file without its texts and colour profile, on whose size and checksums Pillow insists.

    Raises:
        ValueError: It is not a PNG file.
    """
    if not raw.startswith(_PNG_HEAD):
        raise ValueError("not a PNG file")
    kept, place = [_PNG_HEAD], len(_PNG_HEAD)
    while place < len(raw):
        (length,), kind = struct.unpack_from(">I", raw, place), raw[place + 4 : place + 8]
        chunk = raw[place : place + 12 + length]
        is_whole = struct.pack(">I", zlib.crc32(chunk[4:-4])) == chunk[-4:]
        # The case of the first letter says whether a decoder needs the chunk.
        if kind[:1].isupper() or kind == b"tRNS" or (kind == b"eXIf" and is_whole):
            kept.append(chunk)
        place += len(chunk)
    return b"".join(kept)


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert to `L` (1 channel) or `RGB` (3 channels) and lay transparent parts on black."""
    target = "L" if channels == 1 else "RGB"
    # A PNG or GIF file of any mode may declare one colour transparent.
    if "transparency" in image.info or (image.mode in _WITH_ALPHA and image.mode != "P"):
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(ground, image)
    return image if image.mode == target else image.convert(target)


def to_square(image: Image.Image, size: int, resize: str) -> Image.Image:
    """Resize to `size` x `size` with Pillow's antialiased bilinear filter."""
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
    """Resize the part `box` of an image, averaging 2 x 2 pixels first if the scale is large.

    Halving first doubles the speed on a radiograph and moves no pixel by more than one level of 255.
    """
    scale = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    if scale >= HALVE_FROM_SCALE:
        image, box = image.reduce(2), (box[0] / 2, box[1] / 2, box[2] / 2, box[3] / 2)
    return image.resize(size, Image.Resampling.BILINEAR, box=box)


def to_array(image: Image.Image) -> NDArray[np.uint8]:
    """Return an `L` or `RGB` image as uint8 `[C, H, W]`."""
    pixels = np.asarray(image, dtype=np.uint8)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _scaled_to_8_bit(values: NDArray[Any], grey_range: tuple[int, int] | None) -> Image.Image:
    """Scale 16-bit grey `[H, W]` to `L`; Pillow's own conversion would clip all above 255 to white."""
    low, high = grey_range or (0, DEEP_MAX)
    wide = values.astype(np.int64).clip(low, high) - low
    width = high - low
    return Image.fromarray(((wide * 255 + width // 2) // width).astype(np.uint8))


@functools.lru_cache(maxsize=2)
def _read_npz(path: Path, time_ns: int) -> dict[str, NDArray[Any]]:
    """Read all arrays; a changed file has another time, and is read again."""
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
        DataError: The file does not exist, is damaged, or holds pickled objects.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return _read_npz(path, path.stat().st_mtime_ns)


def image_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the image arrays of an npz file: those whose name ends in `images`, else its only array.

    Raises:
        DataError: There is none, or one that is not uint8 or uint16 `[N, H, W]` or uint8 `[N, H, W, 1 | 3 | 4]`.
    """
    arrays = read_npz(path)
    found = {name: array for name, array in sorted(arrays.items()) if name.endswith(ARRAY_SUFFIX)}
    found = found or (arrays if len(arrays) == 1 else {})
    if not found:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "none"
        raise DataError(f"{path}: no array whose name ends in '{ARRAY_SUFFIX}'; arrays found: {shapes}")
    for name, array in found.items():
        grey = array.ndim == 3
        coloured = array.ndim == 4 and array.shape[3] in COLOURS and array.dtype == np.uint8
        if array.dtype not in (np.uint8, np.uint16) or not (grey or coloured) or 0 in array.shape:
            raise DataError(
                f"{path}: array '{name}' is {array.dtype} {array.shape}; images must be uint8 [N, H, W] or "
                f"[N, H, W, 1|3|4], or uint16 [N, H, W]"
            )
    return found
