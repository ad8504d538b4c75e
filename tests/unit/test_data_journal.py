"""What an interrupted prepare may leave, and what is believed of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gramgn.data.journal import Journal

from gramgn.data import Decoded, Item

SHAPE = (1, 4, 4)
HEADER = {"decoder": "1"}


def fill(folder: Path, num: int = 5) -> None:
    """Journal a few samples."""
    with Journal(folder, SHAPE, HEADER) as journal:
        for number in range(num):
            pixels = np.full(SHAPE, number, np.uint8)
            decoded = Decoded(pixels, f"hash{number}", 4, 4, "L")
            journal.append(Item(str(number), f"{number}.png", 0.0), (number, 1), decoded)


def test_a_journal_is_read_back(tmp_path: Path) -> None:
    fill(tmp_path)
    with Journal(tmp_path, SHAPE, HEADER) as journal:
        assert journal.num_rows == 5
        assert journal.entry("3").sha256 == "hash3"
        assert (journal.pixels()[journal.row("3")] == 3).all()
        assert journal.find(Item("3", "3.png", 0.0), (3, 1)) is not None


@pytest.mark.parametrize("stamp", [(4, 1), (3, 2)])
def test_a_replaced_file_is_decoded_again(tmp_path: Path, stamp: tuple[int, int]) -> None:
    """D02: a file that was mended (other size or time) is not taken from the journal."""
    fill(tmp_path)
    with Journal(tmp_path, SHAPE, HEADER) as journal:
        assert journal.find(Item("3", "3.png", 0.0), stamp) is None


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_line_ends_what_is_believed(tmp_path: Path, cut: int) -> None:
    fill(tmp_path)
    lines = (tmp_path / "journal.jsonl").read_bytes()
    (tmp_path / "journal.jsonl").write_bytes(lines[:-cut])
    with Journal(tmp_path, SHAPE, HEADER) as journal:
        kept = journal.num_rows
        assert kept == (lines[:-cut]).count(b"\n") < 5
        journal.append(
            Item("9", "9.png", 0.0), (9, 1), Decoded(np.full(SHAPE, 9, np.uint8), "hash9", 4, 4, "L")
        )
    with Journal(tmp_path, SHAPE, HEADER) as journal:
        assert journal.num_rows == kept + 1
        assert (journal.pixels()[journal.row("9")] == 9).all()


@pytest.mark.parametrize("damage", ["cut", "zeroed"])
def test_lost_pixels_end_what_is_believed(tmp_path: Path, damage: str) -> None:
    """After a power failure lines may be on the disk whose pixels are not."""
    fill(tmp_path)
    pixels = (tmp_path / "pixels.u8").read_bytes()
    rest = b"" if damage == "cut" else bytes(len(pixels) - 40)
    (tmp_path / "pixels.u8").write_bytes(pixels[:40] + rest)
    with Journal(tmp_path, SHAPE, HEADER) as journal:
        assert journal.num_rows == 2
        assert (journal.pixels()[1] == 1).all()


@pytest.mark.parametrize(("shape", "header"), [((3, 4, 4), HEADER), (SHAPE, {"decoder": "2"})])
def test_another_decoder_begins_anew(
    tmp_path: Path, shape: tuple[int, int, int], header: dict[str, str]
) -> None:
    fill(tmp_path)
    with Journal(tmp_path, shape, header) as journal:
        assert journal.num_rows == 0
