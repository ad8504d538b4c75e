"""Writing a synthetic set to disk: in parallel, one process at a time, whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gramgn.data import SYNTHETIC_MARKER
from gramgn.errors import DataError
from gramgn.files import flush_folder, free_bytes, write_text, writing
from gramgn.locks import locked
from gramgn.progress import say, track
from gramgn.workers import available_cores, check_main_guard, map_in_processes

CHUNK = 32  # pictures per task
ALONE_BELOW = 96  # drawing fewer pictures takes less time than starting processes


class Case(Protocol):
    """Something to be drawn into one file."""

    @property
    def path(self) -> str:
        """File relative to the root of the set."""


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Recipe(Generic[C]):
    """The content of a synthetic set.

    Attributes:
        cases: Every picture.
        draw: Turns a case into the bytes of its file; picklable.
        extras: Small further files: relative path to bytes.
        marker: Content of `synthetic.json`: all that decides the bytes.
        bytes_per_image: Typical size of a file, to fail early where the disk is too full.
    """

    cases: Sequence[C]
    draw: Callable[[C], bytes]
    extras: dict[str, bytes]
    marker: dict[str, Any]
    bytes_per_image: int


def matches(folder: Path, marker: dict[str, Any]) -> bool:
    """Return whether the set with this marker is in `folder`.

    Raises:
        DataError: Something else is there, e.g. a set drawn by another version of the generator.
    """
    if not folder.exists():
        return False
    found = _read_marker(folder)
    if found == marker:
        return True
    raise DataError(
        f"{folder} was not drawn by this version with these options\n"
        f"  expected in {SYNTHETIC_MARKER}: {json.dumps(marker)}\n"
        f"  found: {json.dumps(found) if found else f'no readable {SYNTHETIC_MARKER}'}\n"
        f"  Remove or rename that folder (it can be drawn again), or choose another dataset.root"
    )


def _read_marker(folder: Path) -> Any:
    try:
        return json.loads((folder / SYNTHETIC_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def generate(name: str, folder: Path, recipe: Recipe[C], workers: int | None = None) -> None:
    """Draw a synthetic set unless it is there already.

    It is drawn into a hidden folder next to `folder`, which is renamed when the set is complete. After an
    interruption, including `kill -9`, the next start draws the set from the beginning.

    Args:
        name: The data set's name, for messages.
        folder: Where the set goes; its parent is created.
        recipe: Its content.
        workers: Number of processes; all cores if None.

    Raises:
        DataError: The disk is full or not writable, something else lies in `folder`, or a process was killed.
    """
    check_main_guard()
    with writing(folder.parent, "dataset.root", len(recipe.cases) * recipe.bytes_per_image):
        folder.parent.mkdir(parents=True, exist_ok=True)
        busy = f"another process is drawing {folder.name}; waiting for it"
        with locked(folder.parent / f".{folder.name}.lock", busy, wait=True):
            if matches(folder, recipe.marker):
                return
            partial_folder = folder.parent / f".{folder.name}.partial"
            shutil.rmtree(partial_folder, ignore_errors=True)
            try:
                _draw(name, folder, partial_folder, recipe, workers)
            finally:
                shutil.rmtree(partial_folder, ignore_errors=True)


def _draw(name: str, folder: Path, new: Path, recipe: Recipe[C], workers: int | None) -> None:
    """Draw everything in the folder `new` and rename it to `folder`."""
    if free_bytes(new) < len(recipe.cases) * recipe.bytes_per_image:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new))
    say(f"dataset {name}: drawing {len(recipe.cases)} synthetic pictures in {folder}")
    start = time.monotonic()
    files = [*(case.path for case in recipe.cases), *recipe.extras]
    for parent in sorted({(new / file).parent for file in files}):
        parent.mkdir(parents=True, exist_ok=True)
    write_text(new / SYNTHETIC_MARKER, json.dumps(recipe.marker, indent=1) + "\n")
    counts = _draw_all(name, new, recipe, available_cores() if workers is None else workers)
    steps = (None for count in counts for _ in range(count))
    for _ in track(steps, total=len(recipe.cases), label=f"drawing {name}", unit="pictures"):
        pass
    for path, content in recipe.extras.items():
        (new / path).write_bytes(content)
    flush_folder(new)
    new.rename(folder)
    flush_folder(folder.parent)
    say(f"dataset {name}: drawn in {time.monotonic() - start:.1f} s")


def _draw_all(name: str, folder: Path, recipe: Recipe[C], workers: int) -> Iterable[int]:
    """Draw all cases below `folder`, here or in fresh processes, and yield how many were drawn."""
    draw = partial(_draw_chunk, folder, recipe.draw)
    if workers <= 1 or len(recipe.cases) < ALONE_BELOW:
        return (draw([case]) for case in recipe.cases)
    chunks = [recipe.cases[start : start + CHUNK] for start in range(0, len(recipe.cases), CHUNK)]
    died = f"dataset {name}: a process that draws pictures died."
    return map_in_processes(draw, chunks, min(workers, len(chunks)), died=died)


def _draw_chunk(folder: Path, draw: Callable[[C], bytes], chunk: Sequence[C]) -> int:
    for case in chunk:
        (folder / case.path).write_bytes(draw(case))
    return len(chunk)
