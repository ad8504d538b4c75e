"""Writing a synthetic set to disk: one process per set, with several workers, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gramgn.data import SYNTHETIC_MARKER
from gramgn.errors import DataError
from gramgn.files import building, free_bytes, write_text
from gramgn.progress import say, track
from gramgn.synthetic.people import FaceCase, HandCase
from gramgn.workers import available_cores, map_in_processes

CHUNK = 32  # pictures per task
ALONE_BELOW = 96  # drawing fewer pictures takes less time than starting processes

Draw = Callable[[Any], bytes]
"""Turns a case into the bytes of its file; picklable."""


class Recipe(NamedTuple):
    """The content of a synthetic set."""

    cases: Sequence[HandCase | FaceCase]
    draw: Draw
    extras: dict[str, bytes]  # small further files: relative path to bytes
    bytes_per_image: int  # typical size of a file, to fail early where the disk is too full


def matches(folder: Path, marker: Mapping[str, Any]) -> bool:
    """Return whether the set with this marker is in `folder`.

    Raises:
        DataError: Something else is there, e.g. a set drawn by another version of the generator.
    """
    if not folder.exists():
        return False
    try:
        found = json.loads((folder / SYNTHETIC_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == marker:
        return True
    raise DataError(
        f"{folder} was not drawn by this version with these options\n"
        f"  expected in {SYNTHETIC_MARKER}: {json.dumps(marker)}\n"
        f"  found: {json.dumps(found) if found else f'no readable {SYNTHETIC_MARKER}'}\n"
        f"  Remove or rename that folder (it can be drawn again), or choose another dataset.root"
    )


def generate(name: str, folder: Path, marker: Mapping[str, Any], recipe: Recipe, workers: int | None) -> None:
    """Draw a synthetic set unless it exists; after an interruption, the next start draws it from the beginning.

    Args:
        name: The data set's name, for messages.
        folder: Where the set goes; its parent is created.
        marker: Content of `synthetic.json`: all that decides the bytes.
        recipe: The other files.
        workers: Number of processes; all cores if None.

    Raises:
        DataError: The disk is full or not writable, something else lies in `folder`, or a process was killed.
    """
    cases, needed_bytes = recipe.cases, len(recipe.cases) * recipe.bytes_per_image
    start = time.monotonic()
    with building(folder, "dataset.root", needed_bytes, "drawing") as new:
        if matches(folder, marker):
            return
        if free_bytes(new) < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new))
        say(f"dataset {name}: drawing {len(cases)} synthetic pictures in {folder}")
        for parent in sorted({(new / file).parent for file in (*(c.path for c in cases), *recipe.extras)}):
            parent.mkdir(parents=True, exist_ok=True)
        write_text(new / SYNTHETIC_MARKER, json.dumps(marker, indent=1) + "\n")
        counts = _draw_all(name, new, recipe, available_cores() if workers is None else workers)
        steps = (None for count in counts for _ in range(count))
        for _ in track(steps, total=len(cases), label=f"drawing {name}", unit="pictures"):
            pass
        for path, content in recipe.extras.items():
            (new / path).write_bytes(content)
    say(f"dataset {name}: drawn in {time.monotonic() - start:.1f} s")


def _draw_all(name: str, folder: Path, recipe: Recipe, workers: int) -> Iterable[int]:
    """Draw all cases below `folder`, here or in fresh processes, and yield the number drawn since the last one."""
    draw, cases = partial(_draw_chunk, folder, recipe.draw), recipe.cases
    if workers <= 1 or len(cases) < ALONE_BELOW:
        return (draw([case]) for case in cases)
    chunks = [cases[start : start + CHUNK] for start in range(0, len(cases), CHUNK)]
    return map_in_processes(
        draw, chunks, workers, died=f"dataset {name}: a process that draws pictures died."
    )


def _draw_chunk(folder: Path, draw: Draw, chunk: Sequence[HandCase | FaceCase]) -> int:
    for case in chunk:
        (folder / case.path).write_bytes(draw(case))
    return len(chunk)
