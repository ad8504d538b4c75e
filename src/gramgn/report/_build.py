"""From run folders or results files to the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gramgn.errors import InputError
from gramgn.figures import Loaded, drawings, figure_sets, load_runs, make_figures, read_results
from gramgn.progress import say
from gramgn.records import write_atomic

from ._claims import claim_groups
from ._entries import Entry, load_entries, relative
from ._overview import Problem, problems
from ._page import render
from ._pictures import PictureSet, picture_sets
from ._sweeps import absent_jobs


def make_report(
    runs: Path,
    out: Path,
    *,
    figures: Path,
    results: Sequence[Path] | None = None,
    report: Callable[[str], None] = say,
) -> Path:
    """Write one HTML page about all runs, whatever their state. The same runs give the same bytes.

    Args:
        runs: Folder to search for runs, to any depth.
        out: The HTML file; its folder is made if missing.
        figures: Folder of figures, as of ``make figures``: what is not up to date there is drawn again.
        results: Results files to read instead of ``runs``; they hold only part of a run's settings.
        report: Called with one line on what was found.

    Returns:
        The HTML file.

    Raises:
        InputError: There is no run at all, an input is damaged, or a file cannot be written.
    """
    found = _from_results(results) if results else _from_folders(Path(runs).absolute())
    if not found.entries and not found.problems and not found.loaded:
        raise InputError(
            f"no run in {found.place}. Make some with `make demo` (a few minutes), or one with "
            "`python train.py trainer=laptop`."
        )
    _make_folder(out.parent)
    left_out = list(found.left_out)
    sets, _ = figure_sets(found.loaded)
    pictures: list[PictureSet] = []
    if found.loaded:
        make_figures(found.loaded, figures, report=lambda line: None)
        pictures = picture_sets(sets, drawings(found.loaded, report=left_out.append), figures)
    write_atomic(
        out,
        render(
            found.entries,
            found.problems,
            claim_groups(sets, found.loaded.theory),
            pictures,
            left_out,
            found.source,
        ),
    )
    report(f"{len(found.entries)} runs; {len(found.problems)} jobs listed as not ended well")
    return out


@dataclass(frozen=True)
class _Found:
    """What the page is about.

    Attributes:
        entries: All runs, ordered by path.
        problems: What did not end well or is not there.
        loaded: The runs as figures and claims take them.
        left_out: Lines on runs that figures and claims do not use.
        source: Where all this comes from, in words for the page.
        place: The same for messages, with whole paths.
    """

    entries: list[Entry]
    problems: list[Problem]
    loaded: Loaded
    left_out: list[str]
    source: str
    place: str


def _from_folders(top: Path) -> _Found:
    entries, unreadable = load_entries(top)
    loaded = load_runs(top)
    left_out = [relative(line, top) for line in loaded.omitted]
    listed = problems(entries, unreadable, absent_jobs(top))
    return _Found(entries, listed, loaded, left_out, f"the run folders under {top.name}/", str(top))


def _from_results(paths: Sequence[Path]) -> _Found:
    loaded = read_results(paths)
    runs = sorted([*loaded.runs, *loaded.unfinished], key=lambda run: run.path)
    entries = [Entry(run.path, run.record, run.rows) for run in runs]
    names = ", ".join(path.name for path in paths)
    source = f"the published numbers in {names}, which hold part of each run's settings"
    return _Found(entries, problems(entries, {}), loaded, list(loaded.omitted), source, loaded.source)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder.absolute()}: {error.strerror or error}") from error
