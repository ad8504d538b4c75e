"""Writing, finding and reading the theory's files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from gramgn.errors import InputError
from gramgn.tracking.records import write_atomic

from ._records import Cost, Epoch, Setting, Theory, TheoryRun

FOLDER = "theory"
"""Below ``outputs/``: where ``make theory`` writes and plain ``make figures`` looks."""


def is_theory_file(path: Path) -> bool:
    """Tell by its first line whether a file is one of the theory's; a file that cannot be read is none."""
    try:
        with path.open(encoding="utf-8") as file:
            head = file.readline()
    except (OSError, UnicodeDecodeError):
        return False
    return head.startswith((Setting.columns()[0] + ",", Cost.columns()[0] + ","))


def find_theory(folder: Path) -> list[Path]:
    """Return the theory's files that ``make theory`` wrote into ``theory/`` of a folder such as ``outputs/``."""
    own = folder if folder.name == FOLDER else folder / FOLDER
    return [path for path in sorted(own.glob("*.csv")) if is_theory_file(path)]


def read_theory(paths: Iterable[Path]) -> Theory:
    """Read the theory's files and check them against their columns.

    Args:
        paths: CSV files of :func:`write_theory`.

    Raises:
        InputError: A file is missing, cut, or not of this kind; the message names file, line and column.
    """
    runs: dict[Setting, TheoryRun] = {}
    costs: list[Cost] = []
    for path in paths:
        names, lines = _lines(path)
        if names == Theory.COST_COLUMNS:
            costs += [Cost.parse(cells, place) for cells, place in lines]
        elif names == Theory.RUN_COLUMNS:
            runs |= {run.setting: run for run in _runs(lines)}
        else:
            unknown = [name for name in names if name not in {*Theory.RUN_COLUMNS, *Theory.COST_COLUMNS}]
            raise InputError(
                f"{path} is not a file of the theory: its columns are others"
                + (f" ({', '.join(map(repr, unknown[:5]))})" if unknown else "")
                + "; scripts/theory.py writes them, outputs/results/README.md describes them"
            )
    return Theory(tuple(runs.values()), tuple(costs))


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
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if text and not text.endswith("\n"):
        raise InputError(f"{path} is cut in mid-line; remove it and repeat: python scripts/theory.py")
    lines = csv.reader(io.StringIO(text))
    names = tuple(next(lines, []))

    def rest() -> Iterator[tuple[list[str], str]]:
        for cells in lines:
            place = f"{path}, line {lines.line_num}"
            if len(cells) != len(names):
                raise InputError(f"{place}: {len(cells)} cells, expected {len(names)}")
            yield cells, place

    return names, rest()


def _runs(lines: Iterator[tuple[list[str], str]]) -> Iterator[TheoryRun]:
    width = len(Setting.columns())
    found: dict[Setting, list[Epoch]] = {}
    last = ""
    for cells, last in lines:
        setting, epoch = Setting.parse(cells[:width], last), Epoch.parse(cells[width:], last)
        rows = found.setdefault(setting, [])
        if epoch.epoch <= (rows[-1].epoch if rows else -1) or (not rows and epoch.epoch):
            raise InputError(f"{last}: epoch {epoch.epoch} is doubled, out of order, or the first is missing")
        rows.append(epoch)
    for setting, rows in found.items():
        if len(rows) < 3 or rows[-1].epoch != setting.epochs:
            raise InputError(
                f"{last.rpartition(', line')[0]}: a run of {setting.study} with M = {setting.M}, seed {setting.seed} "
                f"ends at epoch {rows[-1].epoch} of {setting.epochs}; remove the file and repeat: "
                "python scripts/theory.py"
            )
        yield TheoryRun(setting, tuple(rows))
