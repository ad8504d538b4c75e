"""Reading CSV files of ours as text, whatever stands in them and whatever program saved them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from gramgn.errors import InputError

LONGEST = 2000
"""Characters of the longest cell that is read: a closing quote that is missing would make one cell of the rest."""


def read_lines(path: Path, what: str, remedy: str) -> Iterator[tuple[list[str], str]]:
    """Yield the lines of a CSV file as cells, each with its place for messages; the first is the header.

    The byte-order mark and the line ends that other programs write are taken off.

    Args:
        path: The file.
        what: What it should be, e.g. ``"the results file"``.
        remedy: What to do if it is cut.

    Raises:
        InputError: It is missing, cannot be read, or is cut; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"there is no results file {path}") from error
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {what} {path}: it is not UTF-8 text") from error
    if text and not text.endswith("\n"):
        raise InputError(f"{path} is cut in mid-line; {remedy}")
    lines = csv.reader(io.StringIO(text))
    try:
        for cells in lines:
            place = f"{path}, line {lines.line_num}"
            if max(map(len, cells), default=0) > LONGEST:
                raise InputError(f"{place}: a cell of more than {LONGEST} characters; is a quote left open?")
            yield cells, place
    except csv.Error as error:
        raise InputError(f"{path}, line {lines.line_num}: {error}") from error
