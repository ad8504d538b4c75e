"""Which figures are up to date: what they were drawn from, by whom, and whether the files are still those."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

from gramgn.records import write_atomic
from gramgn.theory.rates import __file__ as _rates_file

NAME = "inputs.json"


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return what ``inputs.json`` of a folder holds, by figure; empty if it is missing or of no use.

    A damaged file only means that everything is drawn again.

    Args:
        folder: Folder of figures.
    """
    path = folder / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def write_inputs(folder: Path, figures: dict[str, Any]) -> None:
    """Write ``inputs.json``.

    Args:
        folder: Folder of figures.
        figures: By figure, what :func:`entry` returned.
    """
    text = {
        "about": "what each figure was drawn from; remove this file to draw all again",
        "figures": figures,
    }
    write_atomic(folder / NAME, json.dumps(text, indent=1, sort_keys=True) + "\n")


def entry(inputs: str, paths: list[Path]) -> dict[str, Any]:
    """Return what is kept of a figure: hashes of its inputs, of the code that drew it, and of its files."""
    return {"inputs": inputs, "code": code_version(), "files": {path.name: _sha256(path) for path in paths}}


def is_fresh(kept: Any, inputs: str, paths: list[Path]) -> bool:
    """Return whether a figure's files are there, unaltered, from the same inputs and the same code."""
    return all(path.is_file() for path in paths) and bool(kept == entry(inputs, paths))


@cache
def code_version() -> str:
    """Return a hash of the drawing code and matplotlib's version: another look means drawing again."""
    found = hashlib.sha256(matplotlib.__version__.encode())
    for path in [*sorted(Path(__file__).parent.rglob("*.py")), Path(_rates_file)]:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
