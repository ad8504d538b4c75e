"""AFAD from its archive parts: verified one by one, joined while unpacking, and unpacked safely."""

from __future__ import annotations

import hashlib
import lzma
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from gramgn.data.scan import some
from gramgn.errors import DataError, checked_choice
from gramgn.files import building
from gramgn.progress import say, track

PARTS_OF = {"lite": "AFAD-Lite.tar.xz", "full": "AFAD-Full.tar.xz"}
NUM_IMAGES = {"lite": 59_344, "full": 165_501}
BLOCK_BYTES = 2**20


def unpack_afad(
    archive: str | Path, target: str | Path, *, checksums: str | Path, variant: str = "lite"
) -> Path:
    """Verify AFAD's archive parts against their published hashes and unpack them.

    The parts are read one after the other as one stream: no joined copy is written. They are unpacked
    into a folder next to the target, which is renamed when it is complete; after an interruption run it again.

    Args:
        archive: Folder with `AFAD-Lite.tar.xzaa`, `...xzab` and so on.
        target: Folder to unpack into, the data set's root.
        checksums: File with one line `<git blob id> <name of the part>` per part.
        variant: `"lite"` (the default) or `"full"`.

    Returns:
        The target.

    Raises:
        DataError: A part is missing or differs from its hash; an entry that is a device, or that would leave the
            target; a full disk.
    """
    checked_choice("variant", variant, tuple(PARTS_OF))
    archive, target = Path(archive).absolute(), Path(target).absolute()
    published = _read_checksums(Path(checksums), re.compile(re.escape(PARTS_OF[variant]) + r"[a-z]{2}"))
    missing = [name for name in published if not (archive / name).is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(published)} archive parts are missing in {archive}: {some(missing, 3)}. "
            f"Download them from https://afad-dataset.github.io"
        )
    if target.is_dir() and any(target.iterdir()):
        say(f"{target} is not empty: assuming that it is unpacked already; remove it to unpack again")
        return target
    for name in track(published, total=len(published), label="verifying archive parts", unit="parts"):
        if _blob_id(archive / name) != published[name]:
            raise DataError(f"{archive / name} differs from the published file; download this part again")
    with building(target, "dataset.root", 0, "unpacking") as new:
        new.mkdir()
        num_files = _unpack([archive / name for name in published], new, NUM_IMAGES[variant])
    say(f"unpacked {num_files} files into {target}")
    return target


def _read_checksums(path: Path, part: re.Pattern[str]) -> dict[str, str]:
    """Return the published hash of every part, in order; the list names other files of the same repository too."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        published = {name: digest for digest, name in rows if part.fullmatch(name)}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the published hashes {path}: {error}") from error
    if not published:
        raise DataError(
            f"{path} names no archive part; expected are lines '<git blob id> <name of the part>'"
        )
    return dict(sorted(published.items()))


def _blob_id(path: Path) -> str:
    """Return git's id of a file, which is what is published: SHA-1 of its size and its bytes."""
    try:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        for block in _blocks([path]):
            digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _blocks(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                yield block


class _Joined:
    """Several files read as one, a block at a time, as far as `lzma` needs it."""

    def __init__(self, paths: list[Path]) -> None:
        self._blocks = _blocks(paths)

    def read(self, size: int = -1) -> bytes:
        return next(self._blocks, b"")


def _unpack(parts: list[Path], folder: Path, expected: int) -> int:
    """Unpack all entries into `folder` and return the number of files."""
    num_files = 0
    try:
        with (
            lzma.open(cast("IO[bytes]", _Joined(parts))) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            for entry in track(tar, total=expected, label="unpacking", unit="files"):
                tar.extract(entry, folder, filter="data")
                num_files += entry.isreg()
    except tarfile.FilterError as error:
        raise DataError(f"the archive's entry {error}; nothing of the archive is used") from error
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise DataError(
            f"the archive parts {parts[0].name}, ... do not unpack: {error or 'unexpected end'}"
        ) from error
    return num_files
