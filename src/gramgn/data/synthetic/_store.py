"""Writing a stand-in to disk: in parallel, resumable, one process at a time, whole or not there at all.

Pictures are drawn into a hidden folder beside the final one, which is renamed when nothing is missing. A file
gets its final name only once it is complete, so after any interruption, ``kill -9`` included, what has a
name is good and the next start draws the rest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gramgn.data._files import flush_folder, free_bytes, locked, writing
from gramgn.data._pool import available_cores, worker_pool
from gramgn.data._scan import MARKER
from gramgn.errors import DataError
from gramgn.progress import say, track

CHUNK = 32  # pictures a task
ALONE_BELOW = 96  # so few pictures are drawn sooner than processes start


class Case(Protocol):
    """Something to be drawn into one file."""

    @property
    def path(self) -> str:
        """File relative to the stand-in's root."""


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Recipe(Generic[C]):
    """What a stand-in consists of.

    Attributes:
        cases: Every picture.
        draw: Turns a case into the bytes of its file; a plain function or a partial of one, for it is
            pickled.
        extras: Small further files: relative path to bytes. They are written after the pictures.
        marker: Content of ``synthetic.json``: all that decides the bytes.
        bytes_per_image: Typical size of a file, to refuse early where the disk is too full.
    """

    cases: Sequence[C]
    draw: Callable[[C], bytes]
    extras: dict[str, bytes]
    marker: dict[str, Any]
    bytes_per_image: int


def matches(folder: Path, marker: dict[str, Any]) -> bool:
    """Say whether a whole stand-in with this marker is in ``folder``.

    Raises:
        DataError: Something else is there, e.g. a set drawn by another version of the generator.
    """
    if not folder.exists():
        return False
    found = read_marker(folder)
    if found == marker:
        return True
    raise DataError(
        f"{folder} was not drawn by this version with these options\n"
        f"  expected in {MARKER}: {json.dumps(marker)}\n"
        f"  found: {json.dumps(found) if found else 'no readable ' + MARKER}\n"
        f"  Remove or rename that folder (it can be drawn again), or choose another dataset.root"
    )


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's marker file, or None where there is none that can be read."""
    path = folder / MARKER
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def generate(name: str, folder: Path, recipe: Recipe[C], workers: int | None = None) -> None:
    """Draw a stand-in unless it is there already; draw what is lost of one that is there.

    Args:
        name: The data set's name, for messages.
        folder: Where it shall lie; its parent is created.
        recipe: What it consists of.
        workers: Processes; all cores if None.

    Raises:
        DataError: The disk is full or not writable, something else lies in ``folder``, or a process was
            killed.
    """
    with writing(folder.parent, "dataset.root", len(recipe.cases) * recipe.bytes_per_image):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f".{folder.name}.lock"):
            if matches(folder, recipe.marker):
                _repair(name, folder, recipe, workers)
            else:
                _draw_anew(name, folder, recipe, workers)


def _repair(name: str, folder: Path, recipe: Recipe[C], workers: int | None) -> None:
    lost = _missing(folder, recipe.cases)
    if lost:
        say(f"dataset {name}: {len(lost)} pictures of {folder} are missing or empty, drawing them again")
        _draw_all(name, folder, recipe, lost, workers)


def _draw_anew(name: str, folder: Path, recipe: Recipe[C], workers: int | None) -> None:
    partial = folder.parent / f".{folder.name}.partial"
    if partial.exists() and read_marker(partial) != recipe.marker:
        shutil.rmtree(partial)
    partial.mkdir(exist_ok=True)
    write_whole(partial / MARKER, (json.dumps(recipe.marker, indent=1) + "\n").encode())
    todo = _missing(partial, recipe.cases)
    if free_bytes(partial) < len(todo) * recipe.bytes_per_image:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
    done = len(recipe.cases) - len(todo)
    already = f" ({done} are there already)" if done else ""
    say(f"dataset {name}: drawing {len(todo)} synthetic pictures in {folder}{already}")
    start = time.monotonic()
    _draw_all(name, partial, recipe, todo, workers)
    for path, content in recipe.extras.items():
        (partial / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(partial / path, content)
    for left_over in list(partial.rglob("*.tmp-*")):
        left_over.unlink(missing_ok=True)
    flush_folder(partial)
    partial.rename(folder)
    flush_folder(folder.parent)
    say(f"dataset {name}: drawn in {time.monotonic() - start:.1f} s")


def _missing(folder: Path, cases: Sequence[C]) -> list[C]:
    """Return the cases without a file, or with an empty one as a power cut may leave it."""
    sizes: dict[str, int] = {}
    for parent in _parents(cases):
        if (folder / parent).is_dir():
            with os.scandir(folder / parent) as found:
                sizes.update((f"{parent}/{entry.name}", entry.stat().st_size) for entry in found)
    return [case for case in cases if not sizes.get(case.path)]


def _parents(cases: Sequence[C]) -> list[str]:
    return sorted({case.path.rpartition("/")[0] for case in cases})


def _draw_all(name: str, folder: Path, recipe: Recipe[C], todo: Sequence[C], workers: int | None) -> None:
    """Draw the given cases below ``folder``, showing progress."""
    for parent in _parents(todo):
        (folder / parent).mkdir(parents=True, exist_ok=True)
    workers = available_cores() if workers is None else workers
    if workers > 1 and len(todo) >= ALONE_BELOW:
        finished = _in_processes(name, folder, recipe, todo, workers)
    else:
        finished = (draw_chunk(folder, recipe.draw, [case]) for case in todo)
    steps = (None for number in finished for _ in range(number))
    for _ in track(steps, total=len(todo), label=f"drawing {name}", unit="pictures"):
        pass


def _in_processes(
    name: str, folder: Path, recipe: Recipe[C], todo: Sequence[C], workers: int
) -> Iterator[int]:
    """Draw in fresh processes and yield counts."""
    chunks = [todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK)]
    died = f"dataset {name}: a process that draws pictures died."
    with worker_pool(min(workers, len(chunks)), died=died) as submit:
        futures = [submit(draw_chunk, folder, recipe.draw, chunk) for chunk in chunks]
        for future in futures:
            yield future.result()


def draw_chunk(folder: Path, draw: Callable[[C], bytes], chunk: Sequence[C]) -> int:
    """Draw and write some cases below ``folder``; return how many."""
    for case in chunk:
        write_whole(folder / case.path, draw(case))
    return len(chunk)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that has its final name only when it is complete."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
    except OSError:
        # Give a full disk its last bytes back; what was wrong is raised all the same.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    temporary.replace(path)
