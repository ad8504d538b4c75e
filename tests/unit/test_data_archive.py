"""AFAD's archive parts: verified, joined, unpacked, and nothing leaves the target."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from data_cases import STEM, snapshot, tar_of, write_afad, write_parts

from gramgn.data import AFAD, unpack_afad
from gramgn.errors import ConfigError, DataError


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """Return an entry that is not a plain file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_parts_round_trip(tmp_path: Path) -> None:
    """D01: the parts as downloaded become the layout that AFAD reads."""
    write_afad(tmp_path / "source" / "AFAD-Lite", 12)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(tmp_path / "source" / "AFAD-Lite", "AFAD-Lite")
    checksums = write_parts(tmp_path / "parts", buffer.getvalue())
    (tmp_path / "parts" / STEM).write_bytes(b"a joined archive that must not be taken for a part")
    root = unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    assert snapshot(root / "AFAD-Lite") == snapshot(tmp_path / "source" / "AFAD-Lite")
    assert len(AFAD(root).index().items) == 16
    assert not list(tmp_path.glob("*.partial"))


def test_unpacking_again_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checksums = write_parts(tmp_path / "parts", tar_of(("AFAD-Lite/18/111/1-0.jpg", b"x")))
    unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    (tmp_path / "raw" / "own.txt").write_text("mine")
    unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    assert (tmp_path / "raw" / "own.txt").read_text() == "mine"
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "entry",
    [
        ("../outside.txt", b"x"),
        ("AFAD-Lite/../../outside.txt", b"x"),
        special("AFAD-Lite/link", tarfile.SYMTYPE, "/etc/passwd"),
        special("AFAD-Lite/link", tarfile.LNKTYPE, "../../outside.txt"),
        special("AFAD-Lite/pipe", tarfile.FIFOTYPE),
        special("AFAD-Lite/device", tarfile.CHRTYPE),
    ],
)
def test_malicious_entries_are_rejected(tmp_path: Path, entry: tarfile.TarInfo | tuple[str, bytes]) -> None:
    """D01: no entry leaves the target folder, and nothing of such an archive is used."""
    content = tar_of(("AFAD-Lite/18/111/1-0.jpg", b"good"), entry)
    checksums = write_parts(tmp_path / "parts", content)
    with pytest.raises(DataError, match="archive's entry"):
        unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    assert not (tmp_path / "raw").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"parts", ".raw.lock"}


def test_absolute_names_stay_below_the_target(tmp_path: Path) -> None:
    """D01: tarfile's data filter makes them relative."""
    checksums = write_parts(tmp_path / "parts", tar_of(("/tmp/outside-gramgn.txt", b"x")))
    unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    assert snapshot(tmp_path / "raw") == {"tmp/outside-gramgn.txt": b"x"}
    assert not Path("/tmp/outside-gramgn.txt").exists()


@pytest.mark.parametrize("damage", ["missing", "changed", "cut"])
def test_bad_parts_are_named(tmp_path: Path, damage: str) -> None:
    """D02: one bad part is found before anything is unpacked."""
    checksums = write_parts(tmp_path / "parts", tar_of(("AFAD-Lite/18/111/1-0.jpg", bytes(5000))))
    part = tmp_path / "parts" / f"{STEM}ac"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1] + (b"?" if damage == "changed" else b""))
    with pytest.raises(DataError, match=f"{STEM}ac"):
        unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    assert not (tmp_path / "raw").exists()


def test_an_incomplete_archive_is_rejected(tmp_path: Path) -> None:
    """Hashes that fit an archive that does not end: no half folder is left under the target's name."""
    checksums = write_parts(tmp_path / "parts", tar_of(("AFAD-Lite/18/111/1-0.jpg", bytes(50_000)))[:20_000])
    with pytest.raises(DataError, match="do not unpack"):
        unpack_afad(tmp_path / "parts", tmp_path / "raw", checksums=checksums)
    assert not (tmp_path / "raw").exists()


def test_no_folder_and_wrong_variant(tmp_path: Path) -> None:
    checksums = write_parts(tmp_path / "parts", tar_of())
    with pytest.raises(DataError, match=r"5 of 5 archive parts are missing .*afad-dataset\.github\.io"):
        unpack_afad(tmp_path / "nowhere", tmp_path / "raw", checksums=checksums)
    with pytest.raises(ConfigError, match="lite, full"):
        unpack_afad(tmp_path, tmp_path / "raw", checksums=checksums, variant="medium")


@pytest.mark.parametrize(("variant", "num"), [("lite", 28), ("full", 46)])
def test_published_hashes_are_complete(repository: Path, variant: str, num: int) -> None:
    lines = (repository / "data" / "checksums" / f"afad_{variant}_parts.sha1").read_text().splitlines()
    parts = [line.split()[1] for line in lines if ".tar.xz" in line]
    assert len(parts) == num
    assert min(parts) == f"AFAD-{variant.capitalize()}.tar.xzaa"
    assert all(len(line.split()[0]) == 40 for line in lines)


@pytest.mark.parametrize("content", ["", "only-one-word\n", f"{'0' * 40} README.txt\n"])
def test_a_useless_list_of_hashes_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "hashes").write_text(content)
    with pytest.raises(DataError, match=str(tmp_path / "hashes")):
        unpack_afad(tmp_path, tmp_path / "raw", checksums=tmp_path / "hashes")
