"""Writing, finding and reading the theory's files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from gramgn.errors import InputError
from gramgn.figures._theory._csv import read_lines
from gramgn.records import write_atomic

from ._records import Cost, Epoch, Setting, Theory, TheoryRun

COMMAND = "python scripts/theory.py"
FOLDER = "theory"
"""Below ``outputs/``: where ``make theory`` writes and plain ``make figures`` looks."""


def is_theory_file(path: Path) -> bool:
    """Tell by its first line whether a file is one of the theory's; a file that cannot be read is none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.readline(1000)
    except (OSError, UnicodeDecodeError):
        return False
    return head.startswith((Setting.columns()[0] + ",", Cost.columns()[0] + ","))


def find_theory(folder: Path) -> list[Path]:
    """Return the theory's files in a folder, or in its ``theory/``, where ``make theory`` writes below ``outputs/``.

    What has their names is one of them, however damaged it is.
    """
    files = [*sorted(folder.glob("*.csv")), *sorted((folder / FOLDER).glob("*.csv"))]
    return [path for path in files if path.match(f"{FOLDER}_*.csv") or is_theory_file(path)]


def read_theory(paths: Iterable[Path], *, omitted: list[str] | None = None) -> Theory:
    """Read the theory's files and check them against their columns.

    Args:
        paths: CSV files of :func:`write_theory`.
        omitted: Gets a line for each file that is damaged, which is then left out; ``None`` raises.

    Raises:
        InputError: A file is missing, cut, or not of this kind; the message names file, line and column.
    """
    runs: dict[Setting, TheoryRun] = {}
    costs: dict[Cost, None] = {}
    for path in paths:
        try:
            found = _read(path)
        except InputError as error:
            if omitted is None:
                raise
            omitted.append(str(error))
            continue
        runs |= {run.setting: run for run in found.runs}
        costs |= dict.fromkeys(found.costs)
    return Theory(tuple(runs.values()), tuple(costs))


def _read(path: Path) -> Theory:
    names, lines = _lines(path)
    if names == Theory.COST_COLUMNS:
        return Theory(costs=tuple(Cost.parse(cells, place) for cells, place in lines))
    if names == Theory.RUN_COLUMNS:
        return Theory(tuple(_runs(lines)))
    unknown = [name[:40] for name in names if name not in {*Theory.RUN_COLUMNS, *Theory.COST_COLUMNS}]
    raise InputError(
        f"{path} is not a file of the theory: its columns are others"
        + (f" ({', '.join(map(repr, unknown[:5]))})" if unknown else "")
        + f"; {COMMAND} writes them, outputs/results/README.md describes them"
    )


def write_theory(theory: Theory, path: Path) -> None:
    """Write runs, or else costs, to a file.

    Args:
        theory: Runs alone or costs alone.
        path: The CSV file, replaced atomically; its folder must exist.

    Raises:
        ValueError: Both runs and costs.
        InputError: The file cannot be written.
    """
    if theory.runs and theory.costs:
        raise ValueError("runs and costs have different columns: write two files")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Theory.COST_COLUMNS if theory.costs else Theory.RUN_COLUMNS)
    for run in theory.runs:
        writer.writerows([*run.setting.cells(), *each.cells()] for each in run.epochs)
    writer.writerows(cost.cells() for cost in theory.costs)
    write_atomic(path, text.getvalue())


def _lines(path: Path) -> tuple[tuple[str, ...], Iterator[tuple[list[str], str]]]:
    lines = read_lines(path, "the theory's file", f"remove it and repeat: {COMMAND}")
    names = tuple(next(lines, ([], ""))[0])

    def rest() -> Iterator[tuple[list[str], str]]:
        for cells, place in lines:
            if len(cells) != len(names):
                raise InputError(f"{place}: {len(cells)} cells, expected {len(names)}")
            yield cells, place

    return names, rest()


def _runs(lines: Iterator[tuple[list[str], str]]) -> Iterator[TheoryRun]:
    width = len(Setting.columns())
    found: dict[Setting, list[Epoch]] = {}
    first: dict[Setting, str] = {}
    for cells, place in lines:
        setting, epoch = Setting.parse(cells[:width], place), Epoch.parse(cells[width:], place)
        if setting not in found:
            _check_setting(setting, place)
        first.setdefault(setting, place)
        rows = found.setdefault(setting, [])
        # All but the last of a run stand equally far apart: contractions are read off them.
        gap = rows[1].epoch - rows[0].epoch if len(rows) > 1 else epoch.epoch
        if epoch.epoch != (rows[-1].epoch + gap if rows else 0) or (rows and gap == 0):
            raise InputError(
                f"{place}: epoch {epoch.epoch} is doubled or out of order, or one before it is missing"
            )
        if not rows and epoch.residual == 0:
            raise InputError(f"{place}, column residual: it is 0 at the start, where nothing is learned yet")
        rows.append(epoch)
    for setting, rows in found.items():
        if len(rows) < 3 or rows[-1].epoch != setting.epochs:
            raise InputError(
                f"{first[setting]}: a run of {setting.study} with M = {setting.M}, seed {setting.seed} "
                f"ends at epoch {rows[-1].epoch} of {setting.epochs}; remove the file and repeat: {COMMAND}"
            )
        yield TheoryRun(setting, tuple(rows))


def _check_setting(setting: Setting, place: str) -> None:
    needed = ("lr",) if setting.method == "gd" else ("lam", "alpha")
    if missing := [name for name in needed if getattr(setting, name) is None]:
        raise InputError(f"{place}: {' and '.join(missing)} of method {setting.method} is empty")
    if setting.b > setting.n:
        raise InputError(f"{place}: a batch of {setting.b} out of {setting.n} samples")
