"""From run folders to figure files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.tracking.records import atomic_file

from ._draw import ERRORS, LOSSES, draw
from ._group import compare
from ._load import Run, load_runs
from ._style import house_style

_KINDS = {"loss": LOSSES, "error": ERRORS}
# Without these entries a file does not tell when and by which version it was made: same data, same bytes.
_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def finished_runs(root: Path, *, report: Callable[[str], None] = say) -> list[Run]:
    """Return the runs that can be shown, and report those that cannot.

    Args:
        root: Folder to search, to any depth.
        report: Called with one line for each run left out.

    Raises:
        InputError: There is no run that can be shown; the message says how to make one.
    """
    runs, omitted = load_runs(root)
    for line in omitted:
        report(f"left out {line}")
    if not runs:
        raise InputError(
            f"no finished run under {Path(root).absolute()}. Make some with `make demo` (a few minutes), or "
            "one with `python train.py trainer=laptop`."
        )
    return runs


def make_figures(root: Path, out: Path, *, report: Callable[[str], None] = say) -> list[Path]:
    """Draw losses and errors against time and epochs, from whatever finished runs there are.

    Two calls on one machine write the same bytes.

    Args:
        root: Folder to search for runs, to any depth.
        out: Folder for the PDF and PNG files; made if missing.
        report: Called with one line for each run left out.

    Returns:
        The files, in the order they were written.

    Raises:
        InputError: There is no run that can be shown, or a file cannot be written.
    """
    written: list[Path] = []
    comparisons = compare(finished_runs(root, report=report))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out.absolute()}: {error.strerror or error}") from error
    for comparison in comparisons:
        for kind, columns in _KINDS.items():
            with house_style():
                figure = draw(comparison, columns)
                if figure is not None:
                    written += _save(figure, out / f"{kind}-{comparison.stem}")
    return written


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = []
    for extension, metadata in _METADATA.items():
        path = stem.with_name(f"{stem.name}.{extension}")
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format=extension, metadata=metadata)
        paths.append(path)
    return paths
