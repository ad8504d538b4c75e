"""Results files: the table of runs as a CSV, small enough to publish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gramgn.errors import InputError
from gramgn.records.columns import (
    ADDED_COLUMNS,
    FLAG,
    INTEGER,
    NUMBER,
    RESULT_COLUMNS,
    SIZE,
    TABLE_COLUMNS,
    THEORY_COLUMNS,
    TRAINING_COLUMNS,
)
from gramgn.records.files import read_regular, write_atomic
from gramgn.records.schema import STATES, WAITING

if TYPE_CHECKING:
    import pandas as pd

_TYPES = {column.name: column.type for column in TABLE_COLUMNS}
_REMEDY = (
    "The columns are described in outputs/results/README.md; "
    "scripts/export_results.py writes such a file from runs."
)


def write_results(table: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a table of runs to a results CSV, so that floats read back exactly.

    Args:
        table: What `runs` returned, or some of its rows.
        path: The CSV file; replaced atomically.

    Raises:
        InputError: The file cannot be written.
    """
    ordered = table.sort_values(["experiment", "sweep", "run"], kind="stable", na_position="first")
    of_theory = THEORY_COLUMNS if ordered["M"].notna().any() else ()
    usual = (
        ordered[list(TRAINING_COLUMNS)].isin(["constant", "none"]) | ordered[list(TRAINING_COLUMNS)].isna()
    )
    of_training = () if usual.all(axis=None) else TRAINING_COLUMNS
    columns = ordered[[*RESULT_COLUMNS, *of_training, *of_theory]]
    flags = columns["standardized"].map({True: "true", False: "false"})
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder of {path}: {error.strerror or error}") from error
    write_atomic(Path(path), columns.assign(standardized=flags).to_csv(index=False, lineterminator="\n"))


def read_results(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return the table of a file of `write_results`, with the columns of the file, `code` and `source`.

    Raises:
        InputError: The file is missing, cut or not a results file; the message names file and column.
    """
    import pandas as pd

    path = Path(path)
    try:
        text = read_regular(path).decode("utf-8-sig")
        if not text.endswith("\n"):
            raise InputError(f"{path} is cut in mid-line; export it again with scripts/export_results.py")
        cells = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"there is no results file {path}; published ones lie in outputs/results") from error
    except OSError as error:
        raise InputError(f"cannot read the results file {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(f"{path} is not a results file: {error}. {_REMEDY}") from error
    cells = cells.assign(**{name: "" for name in ADDED_COLUMNS if name not in cells})
    _check_columns(list(cells.columns), path)
    table = pd.DataFrame({str(name): _parsed(cells[name], path) for name in cells.columns})
    _check_rows(table, path)
    changes = table["git_diff"].str[:6].radd("+").fillna("")
    code = (table["git"].str[:10] + changes).fillna("unknown")
    return table.assign(code=code, source=str(path))


def _check_columns(names: list[str], path: Path) -> None:
    missing = [name for name in RESULT_COLUMNS if name not in names]
    unknown = [name for name in names if name not in RESULT_COLUMNS + TRAINING_COLUMNS + THEORY_COLUMNS]
    faults = [f"it lacks {_few(missing)}"] if missing else []
    faults += [f"{_few(list(map(repr, unknown)))} is unknown here"] if unknown else []
    if faults:
        raise InputError(f"{path} is not a results file: {'; '.join(faults)}. {_REMEDY}")


def _check_rows(table: pd.DataFrame, path: Path) -> None:
    """Check that every row is an epoch of its own, of a run in a known state."""
    is_known = table["state"].isin((*STATES, WAITING))
    is_double = table.duplicated(["run", "began", "epoch"], keep="first")
    for fault, what in ((~is_known, "the state {state!r} is unknown"), (is_double, "the row occurs twice")):
        if fault.any():
            place = int(fault.to_numpy().argmax())
            row = table.iloc[place]
            what = what.format(state=row.state)
            raise InputError(f"{path}, line {place + 2}, run {row.run}: {what}. {_REMEDY}")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _parsed(cells: pd.Series[str], path: Path) -> pd.Series:
    """Return a column of texts as values of its type.

    Raises:
        InputError: A cell is not of that type; the message names file, line and column.
    """
    import pandas as pd

    type_ = _TYPES[str(cells.name)]
    present = cells.where(cells != "")
    if type_ == FLAG:
        return present.map({"true": True, "false": False}).astype("boolean")
    if type_ == SIZE:
        return present.map(lambda cell: int(cell) if str(cell).isdecimal() else cell).astype("object")
    if type_ not in (INTEGER, NUMBER):
        return present.astype("str")
    parse = int if type_ == INTEGER else float
    values = []
    for line, cell in enumerate(cells, start=2):
        try:
            values.append(parse(cell) if cell else None)
        except ValueError as error:
            raise InputError(
                f"{path}, line {line}, column {cells.name}: {cell!r} is not "
                f"{'a whole number' if type_ == INTEGER else 'a number'}. {_REMEDY}"
            ) from error
    return pd.Series(values, dtype="Int64" if type_ == INTEGER else "float64")
