"""RSNA label tables: found by their columns, read from CSV or xlsx, checked row by row."""

from __future__ import annotations

import csv
import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gramgn.data._scan import walk
from gramgn.data._types import Unused
from gramgn.errors import DataError

ID_COLUMNS = ("id", "imageid", "caseid")
AGE_COLUMNS = ("boneage", "boneage(months)", "groundtruthboneage(months)")
SEX_COLUMNS = ("male", "sex")
MAX_MONTHS = 300.0
BLANK = "label row without a usable age (blank, not a number, or not within 0 to 300 months)"
CONFLICT = "id labelled twice with different ages"
_ROLE_WORD = re.compile(r"(?<![a-z])(valid|train|test)")


@dataclass(frozen=True)
class Label:
    """One usable label.

    Attributes:
        id: Number of the image.
        months: Bone age in months.
        sex: ``"M"``, ``"F"`` or empty.
        role: Official set: ``"train"``, ``"validation"`` or ``"test"``.
        table: Path of the table relative to the root.
    """

    id: int
    months: float
    sex: str
    role: str
    table: str


@dataclass
class LabelTables:
    """All label tables of a distribution.

    Attributes:
        labels: One label per set and id, sorted.
        bad_rows: Rows that give no usable age, with the reason.
        unused: Tables that hold no bone ages.
        unusable_ids: Ids with rows of which none gives a usable age.
        ids_without_age: Ids that only a table without ages names (Kaggle's test set).
        num_duplicates: Ids with several rows that agree.
        num_conflicts: Ids with several rows that disagree; none of them is used.
        num_blank: Rows without a usable age.
        facts: Tables read, with their number of rows, for the record.
        notes: Sentences for people.
    """

    labels: list[Label] = field(default_factory=list)
    bad_rows: list[Unused] = field(default_factory=list)
    unused: list[Unused] = field(default_factory=list)
    unusable_ids: set[int] = field(default_factory=set)
    ids_without_age: set[int] = field(default_factory=set)
    num_duplicates: int = 0
    num_conflicts: int = 0
    num_blank: int = 0
    facts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def role_of(names: Sequence[str]) -> str:
    """Return the official set that folder or file names tell, the innermost first; empty where none does."""
    for name in reversed(names):
        word = _ROLE_WORD.search(name.lower())
        if word:
            return {"valid": "validation"}.get(word[0], word[0])
    return ""


def read_tables(root: Path) -> LabelTables:
    """Read every label table below ``root``.

    Args:
        root: Raw folder.

    Raises:
        DataError: A table that cannot be read, or an xlsx table without openpyxl.
    """
    tables = LabelTables()
    rows: list[Label] = []
    sheets = [(name, path) for name, path, ignored in walk(root) if not ignored]
    for name, path in sheets:
        if path.suffix.lower() == ".csv":
            rows += _labels(name, _read_csv(path), tables)
    have_test = any(label.role == "test" for label in rows)
    for name, path in sheets:
        if path.suffix.lower() != ".xlsx":
            continue
        if have_test and (role_of(Path(name).parts) == "test" or "truth" in path.name.lower()):
            # Whether openpyxl is installed may not decide what is used.
            tables.unused.append(Unused(name, "xlsx table not needed: the test truth was read from CSV"))
        else:
            rows += _labels(name, _read_xlsx(path), tables)
    _settle(rows, tables)
    return tables


def _labels(name: str, rows: list[list[str]], tables: LabelTables) -> list[Label]:
    """Turn the rows of one table into labels; note what is not one."""
    header = [_normal(cell) for cell in rows[0]] if rows else []
    id_at, age_at, sex_at = (_position(header, known) for known in (ID_COLUMNS, AGE_COLUMNS, SEX_COLUMNS))
    body = [row + [""] * (len(header) - len(row)) for row in rows[1:] if any(cell.strip() for cell in row)]
    if id_at is None or age_at is None:
        if id_at is not None and sex_at is not None:
            tables.ids_without_age |= {number for row in body if (number := _id(row[id_at])) is not None}
        tables.unused.append(Unused(name, "table without columns for id and bone age"))
        return []
    role = _role_of_table(name, header[id_at], header[age_at])
    labels = []
    for line, row in enumerate(body, start=2):
        number, months = _id(row[id_at]), _months(row[age_at])
        if number is None or months is None:
            tables.num_blank += 1
            tables.unusable_ids |= {number} if number is not None else set()
            tables.bad_rows.append(Unused(f"{name}: row {line} ({row[id_at].strip() or 'no id'})", BLANK))
        else:
            labels.append(Label(number, months, _sex(row[sex_at]) if sex_at is not None else "", role, name))
    tables.facts.append({"table": name, "set": role, "rows": len(body)})
    if role == "test" and labels and all(label.months == int(label.months) for label in labels):
        tables.notes.append(
            f"{name}: all test ages are whole months; the official truth has decimals, and a rounded copy "
            f"that differs from it by 2.8 months on average circulates"
        )
    return labels


def _role_of_table(name: str, id_column: str, age_column: str) -> str:
    """Tell the official set: by file or folder name, else by the columns that only one set's table has."""
    named = role_of(Path(name).parts)
    if named:
        return named
    if age_column.startswith("groundtruth") or id_column == "caseid":
        return "test"
    return "validation" if id_column == "imageid" else "train"


def _settle(rows: list[Label], tables: LabelTables) -> None:
    """Keep one label per set and id; drop all rows of an id whose ages disagree."""
    by_key: dict[tuple[str, int], list[Label]] = defaultdict(list)
    for label in rows:
        by_key[label.role, label.id].append(label)
    for (role, number), same in sorted(by_key.items()):
        if len({label.months for label in same}) > 1:
            tables.num_conflicts += 1
            tables.unusable_ids.add(number)
            tables.bad_rows.append(Unused(f"{same[0].table}: {role} id {number}", CONFLICT))
            continue
        tables.num_duplicates += len(same) > 1
        tables.labels.append(min(same, key=lambda label: (label.sex == "", label.table)))


def _read_csv(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            return list(csv.reader(stream, delimiter=";" if ";" in first and "," not in first else ","))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"cannot read the table {path}: {error}. Save it as comma-separated UTF-8 text"
        ) from error


def _read_xlsx(path: Path) -> list[list[str]]:
    try:
        import openpyxl
    except ImportError as error:
        raise DataError(
            f"reading {path} needs openpyxl: python -m pip install openpyxl, or save the sheet as CSV beside it "
            f"and remove the .xlsx file"
        ) from error
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            cells = book.worksheets[0].iter_rows(values_only=True)
            return [["" if cell is None else str(cell) for cell in row] for row in cells]
        finally:
            book.close()
    except (OSError, KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read the table {path}: {error}. Save the sheet as CSV beside it") from error


def _normal(cell: str) -> str:
    return "".join(cell.lower().split()).replace("_", "")


def _position(header: list[str], known: tuple[str, ...]) -> int | None:
    return next((header.index(name) for name in known if name in header), None)


def _id(cell: str) -> int | None:
    text = cell.strip().lower().removesuffix(".png").removesuffix(".0")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def _months(cell: str) -> float | None:
    try:
        months = float(cell)
    except ValueError:
        return None
    return months if math.isfinite(months) and 0 < months <= MAX_MONTHS else None


def _sex(cell: str) -> str:
    text = cell.strip().lower()
    if text in ("true", "1", "m", "male"):
        return "M"
    return "F" if text in ("false", "0", "f", "female") else ""
