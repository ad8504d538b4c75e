"""AFAD from its archive parts: verified one by one, joined while unpacking, and unpacked safely."""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from gramgn.errors import ConfigError, DataError
from gramgn.files import flush_folder, writing
from gramgn.progress import say, track

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

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
        checksums: File with one line `<git blob id> <name of the part>` for each part.
        variant: `"lite"` or `"full"`.

    Returns:
        The target.

    Raises:
        DataError: A part is missing or differs from its hash; an entry that is a device, or that would leave the
            target; a full disk.
    """
    if variant not in PARTS_OF:
        raise ConfigError(f"variant={variant}: allowed are {', '.join(PARTS_OF)}")
    archive, target = Path(archive).absolute(), Path(target).absolute()
    part = re.compile(re.escape(PARTS_OF[variant]) + r"[a-z]{2}")
    published = _read_checksums(Path(checksums), part)
    _check_complete(archive, published)
    if target.is_dir() and any(target.iterdir()):
        say(f"{target} is not empty: taken as unpacked already; remove it to unpack again")
        return target
    parts = _verified_parts(archive, published)
    partial = target.with_name(target.name + ".partial")
    with writing(target.parent, "dataset.root"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        num_files = _unpack(parts, partial, NUM_IMAGES[variant])
        flush_folder(partial)
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    say(f"unpacked {num_files} files into {target}")
    return target


def _read_checksums(path: Path, part: re.Pattern[str]) -> dict[str, str]:
    """Return the published hash of every part; the list names other files of the same repository too."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        published = {name: digest for digest, name in rows if part.fullmatch(name)}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the published hashes {path}: {error}") from error
    if not published:
        raise DataError(
            f"{path} names no archive part; expected are lines '<git blob id> <name of the part>'"
        )
    return published


def _check_complete(archive: Path, published: dict[str, str]) -> None:
    """Raise DataError if a part is missing: found at once, where hashing takes a while."""
    missing = [name for name in sorted(published) if not (archive / name).is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(published)} archive parts are missing in {archive}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. "
            f"Download them from https://afad-dataset.github.io"
        )


def _verified_parts(archive: Path, published: dict[str, str]) -> list[Path]:
    """Return the parts in order; raise DataError for one that is not the published file."""
    for name in track(sorted(published), total=len(published), label="verifying archive parts", unit="parts"):
        if _blob_id(archive / name) != published[name]:
            raise DataError(f"{archive / name} differs from the published file; download this part again")
    return [archive / name for name in sorted(published)]


def _blob_id(path: Path) -> str:
    """Return git's id of a file, which is what is published: SHA-1 of its size and its bytes."""
    try:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


class _Joined(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self._waiting = list(paths)
        self._stream: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while True:
            if self._stream is None:
                if not self._waiting:
                    return 0
                self._stream = self._waiting.pop(0).open("rb")
            count = self._stream.readinto(buffer)
            if count:
                return count
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        super().close()


def _unpack(parts: list[Path], folder: Path, expected: int) -> int:
    """Unpack all entries into `folder` and return the number of files."""
    num_files = 0
    try:
        with (
            io.BufferedReader(_Joined(parts), BLOCK_BYTES) as joined,
            lzma.open(joined) as plain,
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
