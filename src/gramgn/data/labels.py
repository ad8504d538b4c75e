"""RSNA label tables: recognised by their columns, read from text or xlsx, checked row by row."""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramgn.data.scan import read_bytes, walk
from gramgn.data.types import Unused
from gramgn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

ID_COLUMNS = ("id", "imageid", "caseid")
AGE_COLUMNS = ("boneage", "boneage(months)", "groundtruthboneage(months)")
SEX_COLUMNS = ("male", "sex")
SEXES = {
    **dict.fromkeys(("true", "1", "m", "male"), "M"),
    **dict.fromkeys(("false", "0", "f", "female"), "F"),
}
MAX_MONTHS = 300.0
SHOWN = 30
BLANK = "label row without a usable age (blank, not a number of months, or not within 0 to 300)"
NO_ID = "label row without a usable id (a whole number, all of whose digits are given)"
TEXT_SUFFIXES = (".csv", ".tsv")
TABLE_SUFFIXES = (*TEXT_SUFFIXES, ".xlsx")
SEPARATORS = (",", ";", "\t", "|")
BEYOND = "beyond"
"""Column with the first cell of a row that is beyond the header."""
SHIFTED = "label row whose cells are shifted (a decimal comma without quotes?)"
CONFLICT = "id labelled twice with different ages"
COLUMNS = ["id", "months", "sex", "role", "table"]
"""Number of the image, age, `"M"`, `"F"` or empty, `"train"`, `"validation"` or `"test"`, path of the label table."""
_ROLE_WORD = re.compile(r"(?<![a-z])(valid|train|test)")
_ID = re.compile(r"([0-9]{1,12})([.,]0+)?(\.png|\.jpe?g)?")
_SCIENTIFIC_ID = re.compile(r"([0-9])[.,]?([0-9]*)e\+?([0-9]{1,2})")
_MONTHS = re.compile(r"([0-9.,e+-]+)\s*(months?|mon?\.?)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3},\d{3}")
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)


@dataclass
class LabelTables:
    """All label tables of a distribution."""

    labels: pd.DataFrame  # a row per set and id with the columns `COLUMNS`, sorted
    bad_rows: list[Unused] = field(default_factory=list)  # rows without one usable age
    unused: list[Unused] = field(default_factory=list)  # tables that hold no bone ages
    unusable_ids: set[int] = field(default_factory=set)  # ids whose rows all lack a usable age
    ids_without_age: set[int] = field(default_factory=set)  # only in a table without ages (Kaggle's test set)
    num_duplicates: int = 0  # ids with several rows that agree
    num_conflicts: int = 0  # ids with several rows that disagree; none of those rows is used
    num_blank: int = 0  # rows without a usable age
    headers: dict[str, list[str]] = field(default_factory=dict)  # of the tables without bone ages, by name
    facts: list[dict[str, Any]] = field(default_factory=list)  # the tables read, with their number of rows
    notes: list[str] = field(default_factory=list)  # sentences for people


def role_of(names: Sequence[str]) -> str:
    """Return the official set in the innermost folder or file name that names one, else an empty string."""
    for name in reversed(names):
        word = _ROLE_WORD.search(name.lower())
        if word:
            return "validation" if word[0] == "valid" else word[0]
    return ""


def read_tables(root: Path) -> LabelTables:
    """Read every label table below `root`; raise DataError if one cannot be read, or openpyxl is missing for it."""
    import pandas as pd

    tables = LabelTables(pd.DataFrame(columns=COLUMNS))
    sheets = [(name, path) for name, path, ignored in walk(root) if not ignored]
    found = [
        _labels(name, _read_text(path), tables)
        for name, path in sheets
        if path.suffix.lower() in TEXT_SUFFIXES
    ]
    have_test = any((labels["role"] == "test").any() for labels in found)
    for name, path in sheets:
        if path.suffix.lower() != ".xlsx":
            continue
        if have_test and (role_of(Path(name).parts) == "test" or "truth" in path.name.lower()):
            # The samples must not depend on whether openpyxl is installed.
            tables.unused.append(Unused(name, "xlsx table not needed: the test truth was read from CSV"))
        else:
            found.append(_labels(name, _read_xlsx(path), tables))
    if any(len(labels) for labels in found):
        tables.labels = _settled(pd.concat([labels for labels in found if len(labels)]), tables)
    return tables


def _labels(name: str, cells: pd.DataFrame, tables: LabelTables) -> pd.DataFrame:
    """Turn the cells of one table, its header included, into labels; note the rows that hold none.

    The index of the cells is the number of the line.
    """
    import pandas as pd

    cells = cells[(cells != "").any(axis=1)] if len(cells) else cells
    header = [_normal(cell) for cell in cells.iloc[0]] if len(cells) else []
    id_at, age_at, sex_at = (
        next((header.index(column) for column in known if column in header), None)
        for known in (ID_COLUMNS, AGE_COLUMNS, SEX_COLUMNS)
    )
    body = cells.iloc[1:]
    if id_at is None or age_at is None:
        if id_at is not None and sex_at is not None:
            tables.ids_without_age |= {int(number) for number in body[id_at].map(_id).dropna()}
        tables.headers[name] = [str(cell) for cell in cells.iloc[0] if cell] if len(cells) else []
        tables.unused.append(Unused(name, "table without columns for id and bone age"))
        return tables.labels
    for known in (ID_COLUMNS, AGE_COLUMNS):
        same = [str(cells.iat[0, at]) for at, column in enumerate(header) if column in known]
        if len(same) > 1:
            raise DataError(
                f"the table {name} has several columns of one meaning: {', '.join(same)}. Remove all but one"
            )
    # The official set by file or folder name, else by the columns that only the table of one set has.
    role = role_of(Path(name).parts)
    if not role and (header[age_at].startswith("groundtruth") or header[id_at] == "caseid"):
        role = "test"
    role = role or ("validation" if header[id_at] == "imageid" else "train")
    rows = body[[id_at, age_at]].set_axis(["cell", "age"], axis=1)
    rows["id"], rows["months"] = body[id_at].map(_id), body[age_at].map(_months)
    rows["sex"] = "" if sex_at is None else body[sex_at].str.lower().map(SEXES).fillna("")
    rows["role"], rows["table"] = role, name
    is_shifted = body[BEYOND].str.lower().map(lambda cell: cell in SEXES or cell.isdecimal())
    is_usable = rows["id"].notna() & rows["months"].notna() & ~is_shifted
    bad, labels = rows[~is_usable], rows[is_usable].astype({"id": int, "months": float})
    tables.num_blank += len(bad)
    tables.unusable_ids |= {int(number) for number in bad["id"].dropna()}
    tables.bad_rows += [
        Unused(
            f"{name}: row {row.line} ({row.cell[:SHOWN] or 'no id'}, {row.age[:SHOWN] or 'no age'})",
            SHIFTED if is_shifted[row.line] else NO_ID if pd.isna(row.id) else BLANK,
        )
        for row in rows_of(bad.reset_index(names="line"))
    ]
    tables.facts.append({"table": name, "set": role, "rows": len(body)})
    if role == "test" and len(labels) and (labels["months"] % 1 == 0).all():
        tables.notes.append(
            f"{name}: all test ages are whole months, but the official truth has decimals; a rounded copy is in "
            f"circulation that differs from it by 2.8 months on average"
        )
    return labels[COLUMNS]


def _settled(rows: pd.DataFrame, tables: LabelTables) -> pd.DataFrame:
    """Keep one label per set and id; drop all rows of an id whose ages disagree."""
    conflicting = rows.groupby(["role", "id"])["months"].transform("nunique") > 1
    dropped = rows[conflicting].drop_duplicates(["role", "id"]).sort_values(["role", "id"])
    tables.num_conflicts = len(dropped)
    tables.unusable_ids |= set(dropped["id"].tolist())
    tables.bad_rows += [Unused(f"{row.table}: {row.role} id {row.id}", CONFLICT) for row in rows_of(dropped)]
    kept = rows[~conflicting]
    tables.num_duplicates = int((kept.groupby(["role", "id"]).size() > 1).sum())
    # A row that gives the sex comes before one that does not.
    kept = kept.assign(unknown=kept["sex"] == "").sort_values(
        ["role", "id", "unknown", "table"], kind="stable"
    )
    return kept.drop_duplicates(["role", "id"])[COLUMNS].reset_index(drop=True)


def rows_of(table: pd.DataFrame) -> Iterable[Any]:
    """Return the rows of a table with its columns as attributes."""
    return table.itertuples(index=False)


def _read_text(path: Path) -> pd.DataFrame:
    """Return the stripped cells of a table by line; short rows are filled up, of long ones one more is kept."""
    import pandas as pd

    if path.is_file() and not path.stat().st_size:
        return pd.DataFrame()
    raw = read_bytes(path)
    try:
        # Excel's "Unicode text" is UTF-16 with tabs.
        text = raw.decode("utf-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig")
        lines = text.splitlines(keepends=True)
        declared = _SEPARATOR_LINE.fullmatch(lines[0]) if lines else None
        before = int(declared is not None)
        first, last = (lines[before], lines[-1]) if len(lines) > before else ("", "")
        separator = declared[1] if declared else max(SEPARATORS, key=lambda each: _num_known(first, each))
        reader = csv.reader(lines[before:], delimiter=separator)
        rows = [(before + reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"cannot read the table {path}: {error}. Save it as comma-separated UTF-8 text"
        ) from error
    holds_ages = any(_normal(cell) in AGE_COLUMNS for cell in first.split(separator))
    if holds_ages and not last.endswith("\n") and last.count(separator) < first.count(separator):
        # What is left of the last number may be another one: 7 of 73.
        raise DataError(f"the table {path} is cut in its last line ({last!r:.60}): download it again")
    width = len(rows[0][1]) if rows else 0
    filled = [[cell.strip() for cell in (row + [""] * (width + 1))[: width + 1]] for _, row in rows]
    return pd.DataFrame(filled, [line for line, _ in rows], [*range(width), BEYOND], dtype=str)


def _num_known(header: str, separator: str) -> int:
    """Return how many names of our columns a header has if it is split by a separator."""
    cells = next(csv.reader([header], delimiter=separator), [])
    return sum(_normal(cell) in (*ID_COLUMNS, *AGE_COLUMNS, *SEX_COLUMNS) for cell in cells)


def _read_xlsx(path: Path) -> pd.DataFrame:
    """Return the stripped cells of the first sheet."""
    import pandas as pd

    try:
        content = io.BytesIO(read_bytes(path))
        cells = pd.read_excel(content, header=None, dtype=str, na_filter=False, engine="openpyxl")
    except ImportError as error:
        raise DataError(
            f"reading {path} needs openpyxl: python -m pip install openpyxl, or save the sheet as CSV next to it "
            f"and remove the .xlsx file"
        ) from error
    except (OSError, KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read the table {path}: {error}. Save the sheet as CSV next to it") from error
    return cells.map(str.strip).set_axis(range(1, len(cells) + 1)).assign(**{BEYOND: ""})


def _normal(cell: str) -> str:
    return "".join(cell.lower().split()).replace("_", "")


def _id(cell: str) -> int | None:
    if found := _ID.fullmatch(cell.lower()):
        return int(found[1])
    # A spreadsheet's 1.377e+03 is 1377; of 1.4e+03 digits are lost.
    found = _SCIENTIFIC_ID.fullmatch(cell.lower())
    if found is None or len(found[2]) < int(found[3]):
        return None
    digits = found[1] + found[2]
    whole, rest = digits[: int(found[3]) + 1], digits[int(found[3]) + 1 :]
    return None if rest.strip("0") else int(whole)


def _months(cell: str) -> float | None:
    found = _MONTHS.fullmatch(cell)
    try:
        # A comma before decimals; before three digits it may separate thousands.
        is_clear = found is not None and not _THOUSANDS.fullmatch(found[1])
        months = float(found[1].replace(",", ".")) if found and is_clear else math.nan
    except ValueError:
        return None
    return months if math.isfinite(months) and 0 < months <= MAX_MONTHS else None
