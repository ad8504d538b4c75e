"""Listing raw folders: what is ignored, what is there, and whether this project drew it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gramgn.errors import DataError

SYNTHETIC_MARKER = "synthetic.json"
MARKER_LEVELS_UP = 3
MARKER_LEVELS_DOWN = 2
MAX_DEPTH = 8
IGNORED_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


def is_ignored(name: str) -> bool:
    """Return whether a file or folder belongs to the operating system: hidden ones, `Thumbs.db` and the like."""
    return name.startswith((".", "~$")) or name.lower() in IGNORED_NAMES


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries sorted by name; empty where there is no such folder.

    Raises:
        DataError: The folder cannot be listed, or a name in it is not text: on Linux it may be any bytes.
    """
    if not folder.is_dir():
        return []
    try:
        with os.scandir(folder) as scanned:
            found = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})") from error
    for entry in found:
        try:
            entry.name.encode()
        except UnicodeEncodeError as error:
            name = entry.name.encode("utf-8", "backslashreplace").decode()
            raise DataError(f"{folder}: the name {name} is not valid Unicode; rename or remove it") from error
    return found


def folders(folder: Path) -> list[Path]:
    """Return the folders directly inside, without ignored ones, sorted by name."""
    return [Path(entry.path) for entry in entries(folder) if entry.is_dir() and not is_ignored(entry.name)]


def walk(root: Path, max_depth: int = MAX_DEPTH) -> Iterator[tuple[str, Path, bool]]:
    """Walk all files below `root`, links to folders included, each real folder once.

    Args:
        root: Where to begin.
        max_depth: Folders deeper than this are not entered.

    Yields:
        Relative path with `/`, the path, and whether the file, or a folder on the way to it, is to be
        ignored. An ignored folder is yielded once, as itself.
    """
    seen: set[tuple[int, int]] = set()

    def inside(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path, bool]]:
        status = folder.stat()
        if depth > max_depth or (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        for entry in entries(folder):
            ignored = is_ignored(entry.name)
            if entry.is_dir() and not ignored:
                yield from inside(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)
            else:
                yield f"{prefix}{entry.name}", Path(entry.path), ignored

    if root.is_dir():
        yield from inside(root, "", 0)


def find_marker(root: Path) -> Path | None:
    """Return the marker file that drawing leaves in a raw folder: at, above or below `root`."""
    for folder in [root, *root.parents[:MARKER_LEVELS_UP]]:
        if (folder / SYNTHETIC_MARKER).is_file():
            return folder / SYNTHETIC_MARKER
    level = [root]
    for _ in range(MARKER_LEVELS_DOWN):
        level = [inner for folder in level for inner in folders(folder)]
        for folder in level:
            if (folder / SYNTHETIC_MARKER).is_file():
                return folder / SYNTHETIC_MARKER
    return None


def describe_folder(folder: Path) -> str:
    """Describe the content of a folder in one line, for messages."""
    if not folder.exists():
        return "nothing: there is no such folder"
    if not folder.is_dir():
        return f"a file of {folder.stat().st_size} bytes, not a folder"
    found = entries(folder)
    if not found:
        return "nothing: the folder is empty"
    inner = [entry.name + "/" for entry in found if entry.is_dir()]
    files = [entry.name for entry in found if not entry.is_dir()]
    parts = [f"{_some(inner)} ({len(inner)} folders)"] if inner else []
    parts += [f"{_some(files)} ({len(files)} files)"] if files else []
    return " and ".join(parts)


def _some(names: list[str], num: int = 4) -> str:
    return ", ".join(names[:num]) + (", ..." if len(names) > num else "")
