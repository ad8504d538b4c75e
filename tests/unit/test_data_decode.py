"""From file to pixels: one routine, every pixel format, explicit limits."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_cases import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gramgn.data import Decoder, Item, load_image
from gramgn.errors import DataError

BILINEAR = Image.Resampling.BILINEAR


def test_16_bit_ramp_keeps_its_levels(tmp_path: Path) -> None:
    """D03: a 16-bit PNG is scaled by its full range and does not turn white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    pixels = load_image(tmp_path / "ramp.png", 256, channels=1)
    assert len(np.unique(pixels)) == 256
    assert np.abs(pixels[0] - ramp / 257.0).max() <= 0.5


@pytest.mark.parametrize("mode", ["I", "F"])
def test_unsupported_pixel_formats_name_the_file(tmp_path: Path, mode: str) -> None:
    """D03: a pixel format without a declared range is rejected with the path."""
    path = tmp_path / "deep.tif"
    Image.fromarray(np.ones((8, 8), np.float32 if mode == "F" else np.int32)).save(path)
    with pytest.raises(DataError, match=r"deep\.tif: pixel format " + mode):
        load_image(path, 8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "RGB", "LA", "RGBA", "P", "CMYK", "I;16"])
def test_every_mode_gives_one_shape(tmp_path: Path, mode: str, channels: int) -> None:
    """D07: L, RGB, LA, RGBA, P, CMYK and 16-bit images all come out with the channels asked for."""
    grey = np.linspace(0, 255, 24 * 20).reshape(24, 20)
    image = Image.fromarray(grey.astype(np.uint8))
    image = Image.fromarray((grey * 257).astype(np.uint16)) if mode == "I;16" else image.convert(mode)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    image.save(path)
    pixels = load_image(path, 12, channels=channels)
    assert (pixels.shape, pixels.dtype) == ((channels, 12, 12), np.uint8)
    if mode != "1":
        expected = np.asarray(Image.fromarray(grey.astype(np.uint8)).resize((12, 12), BILINEAR)).astype(int)
        tolerance = 30 if mode == "P" else 2  # a palette has few colours
        assert np.abs(pixels[0].astype(int) - expected).max() <= tolerance


def test_a_range_of_16_bit_grey_is_a_window(tmp_path: Path) -> None:
    """12 bits in 16: all levels instead of 17; what lies outside is black or white."""
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    np.savez(tmp_path / "ramp.npz", images=ramp[None])
    assert len(np.unique(load_image(tmp_path / "ramp.png", 64, channels=1))) == 17
    for path in ("ramp.png", "ramp.npz#images/0"):
        decoded = Decoder(tmp_path, 64, 1, "stretch", (1000, 2275))(Item("a", path, 0.0))
        assert decoded.brightest == 4095
        window = decoded.pixels[0].ravel()
        assert (window[:1001].max(), window[2275:].min(), len(np.unique(window))) == (0, 255, 256)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "P", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_colour_that_is_declared_transparent_is_black(tmp_path: Path, mode: str, channels: int) -> None:
    """D07: PNG's colour key hides a colour in every mode; the other pixels stay."""
    grey = np.full((8, 8), 180, np.uint8)
    grey[:, :4] = 255
    image = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey)
    image = image if mode in ("I;16", "L") else image.convert(mode, dither=Image.Dither.NONE)
    key = {"RGB": (255, 255, 255), "I;16": 65535, "P": image.getpixel((0, 0)), "1": 255}.get(mode, 255)
    image.save(tmp_path / "key.png", transparency=key)
    pixels = load_image(tmp_path / "key.png", 8, channels=channels)
    assert pixels[:, :, :3].max() == 0
    if mode != "1":
        assert abs(int(pixels[0, 0, 7]) - 180) <= 30


def test_transparent_parts_are_black(tmp_path: Path) -> None:
    """D07: what hides under transparency does not shine through."""
    image = Image.new("RGBA", (8, 8), (255, 255, 255, 0))
    image.putpixel((0, 0), (200, 100, 50, 255))
    image.save(tmp_path / "clear.png")
    pixels = load_image(tmp_path / "clear.png", 8)
    assert pixels[:, 0, 0].tolist() == [200, 100, 50]
    assert pixels[:, 1:, 1:].max() == 0


@pytest.mark.parametrize("kind", ["noise", "checkerboard"])
@pytest.mark.parametrize("side", [1500, 700])
def test_downscaling_agrees_with_pillow(tmp_path: Path, kind: str, side: int) -> None:
    """D06: one antialiased routine; within one level of Pillow's own filter, large reductions included."""
    if kind == "noise":
        image = picture(0, (side, side), "L")
    else:
        row, column = np.indices((side, side))
        image = Image.fromarray(((row + column) % 2 * 255).astype(np.uint8))
    image.save(tmp_path / "image.png")
    ours = load_image(tmp_path / "image.png", 64, channels=1)[0].astype(int)
    theirs = np.asarray(image.resize((64, 64), BILINEAR)).astype(int)
    assert np.abs(ours - theirs).max() <= 1
    if kind == "checkerboard":
        assert np.abs(ours - 127.5).max() <= 1  # without antialiasing it would be black or white


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.sampled_from(["stretch", "pad", "crop"])
)
def test_any_size_gives_a_square(width: int, height: int, size: int, resize: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Image.new("L", (width, height), 200).save(f"{folder}/image.png")
        square = load_image(f"{folder}/image.png", size, resize=resize, channels=1)
    assert square.shape == (1, size, size)
    assert square.max() == 200
    assert resize == "pad" or square.min() == 200


def test_resize_modes_keep_what_they_promise(tmp_path: Path) -> None:
    image = Image.new("L", (40, 20))
    image.paste(255, (10, 0, 30, 20))
    image.save(tmp_path / "image.png")
    assert load_image(tmp_path / "image.png", 20, resize="crop", channels=1).min() == 255
    (padded,) = load_image(tmp_path / "image.png", 20, resize="pad", channels=1)
    assert padded[:5].max() == padded[15:].max() == 0
    assert padded[10, 9] == 255


@pytest.mark.parametrize("size", [(20, 24), (300, 200), (90, 31)])
def test_torchvision_returns_the_same_bytes(tmp_path: Path, size: tuple[int, int]) -> None:
    """D06: what `torchvision.transforms.v2` makes of the image is what we train on, without importing it."""
    transforms = pytest.importorskip("torchvision.transforms.v2.functional")
    image = picture(1, size)
    image.save(tmp_path / "image.png")
    theirs = np.asarray(transforms.resize(image, [32, 32], antialias=True)).transpose(2, 0, 1)
    np.testing.assert_array_equal(load_image(tmp_path / "image.png", 32), theirs)


def test_orientation_is_honoured_once(tmp_path: Path) -> None:
    """D06: a photo stored sideways stands upright, and its tag is not applied a second time."""
    upright = Image.new("L", (8, 16))
    upright.paste(255, (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned by 90 degrees
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "side.png", exif=exif)
    assert load_image(tmp_path / "side.png", 16, channels=1)[0, :3].min() == 255


@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_corrupt_exif_is_noted_not_rejected(tmp_path: Path, exif: bytes) -> None:
    """D02: noise in the metadata of a sound photo is recorded and harmless."""
    picture(0).save(tmp_path / "photo.jpg", exif=exif)
    decoded = Decoder(tmp_path, 8, 3, "stretch")(Item("photo", "photo.jpg", 0.0))
    assert (decoded.width, decoded.height, decoded.mode) == (20, 24, "RGB")
    assert "Corrupt EXIF" in decoded.note


def chunk(kind: bytes, content: bytes, *, damaged: bool = False) -> bytes:
    """Return a chunk of a PNG file."""
    checksum = zlib.crc32(kind + content) ^ damaged
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


BIG = zlib.compress(bytes(2 << 20))
METADATA = {
    "a large text": chunk(b"zTXt", b"Comment\0\0" + BIG),
    "a large international text": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + BIG),
    "a large colour profile": chunk(b"iCCP", b"ICC\0\0" + BIG),
    "a text of another checksum": chunk(b"tEXt", b"Comment\0words", damaged=True),
    "an EXIF of another checksum": chunk(b"eXIf", b"II*\0", damaged=True),
    "an EXIF that is none": chunk(b"eXIf", b"no such thing"),
    "an EXIF that is cut": chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01"),
}


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_of_a_png_is_harmless(tmp_path: Path, metadata: str, place: str) -> None:
    """D02: every pixel is whole, so that only a note remains; the orientation next to it is honoured."""
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = {} if "EXIF" in metadata else {"exif": exif}
    picture(0, (30, 20)).save(tmp_path / "plain.png", **sideways)
    raw = (tmp_path / "plain.png").read_bytes()
    at = raw.index(b"IDAT" if place == "before" else b"IEND") - 4
    (tmp_path / "odd.png").write_bytes(raw[:at] + METADATA[metadata] + raw[at:])
    decode = Decoder(tmp_path, 16, 3, "stretch")
    plain, odd = (decode(Item(name, f"{name}.png", 0.0)) for name in ("plain", "odd"))
    assert (plain.pixels == odd.pixels).all()
    assert odd.width == (30 if "EXIF" in metadata else 20)
    assert plain.note == ""
    assert "large" not in metadata or "metadata that cannot be read left out" in odd.note


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b"<html></html>", "not an image")])
def test_files_that_are_no_images_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    """D02: a 0-byte file and an HTML file named .jpg are rejected with path and reason."""
    path = tmp_path / "17.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"17\.jpg.*{reason}"):
        load_image(path, 8)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "BMP", "TIFF", "GIF", "WEBP"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_truncated_images_are_rejected(tmp_path: Path, format_: str, share: float) -> None:
    """D02: half an image is never silently grey: truncated files are rejected with the path."""
    buffer = io.BytesIO()
    picture(3, (60, 80)).save(buffer, format_)
    path = tmp_path / "half.jpg"
    path.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * share)])
    with pytest.raises(DataError, match=r"half\.jpg"):
        load_image(path, 8)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.png: cannot be read"):
        load_image(tmp_path / "gone.png", 8)


def test_large_radiographs_pass(tmp_path: Path) -> None:
    """D14: 3000 x 4000 passes."""
    Image.new("L", (3000, 4000), 9).save(tmp_path / "large.png", compress_level=1)
    assert load_image(tmp_path / "large.png", 8, channels=1).min() == 9


@pytest.mark.parametrize("side", [8001, 20_000])
def test_huge_images_are_rejected_by_name(tmp_path: Path, side: int) -> None:
    """D14: above the explicit limit there is a named error, before anything is decoded."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks
    )
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    with pytest.raises(DataError, match=r"huge\.png.*limit of 64,000,000 pixels"):
        load_image(tmp_path / "huge.png", 64)
