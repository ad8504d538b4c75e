"""Whether the raw data has changed since a set was prepared from it.

This is not the identity of the content, which resuming and sweeps go by: it only decides when to look again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gramgn.data.scan import some
from gramgn.errors import DataError
from gramgn.files import write_text

if TYPE_CHECKING:
    from gramgn.data.dataset import ImageDataset

RECORD = "raw.json"
NO_EFFECT = ("name", "prepared_root", "on_bad_image", "limit", "workers")
"""Options of every data set that do not decide the content."""
OURS = "gramgn"


class RawState(NamedTuple):
    """What decides the content of a prepared set, as far as it is known without opening a raw file."""

    files: dict[str, list[int]]  # size in bytes and modification time in ns, by the path below the root
    options: dict[str, Any]  # plain attributes of a user-defined class: its `settings` may lack some
    code: dict[str, str]  # sha256 of the modules of a user-defined class, by name

    def write(self, folder: Path) -> None:
        """Record the state with a prepared set."""
        write_text(folder / RECORD, json.dumps(self._asdict()) + "\n")

    def only_lacks(self, before: RawState) -> bool:
        """Return whether the files are some of those of `before`, unchanged, and not all of them."""
        return len(self.files) < len(before.files) and all(
            before.files.get(name) == facts for name, facts in self.files.items()
        )


def raw_state(dataset: ImageDataset) -> RawState:
    """Return the present state of the raw data of a data set."""
    files = {}
    try:
        for name, path in dataset.raw_files():
            status = path.stat()
            files[name] = [status.st_size, status.st_mtime_ns]
    except (OSError, DataError):
        files = {}  # nothing that could be used; if it is needed, indexing will report the reason
    mine = [base for base in type(dataset).__mro__ if is_foreign(base.__module__)]
    if not mine:
        return RawState(files, {}, {})
    plain = (bool, int, float, str, type(None))
    options = {
        name: value
        for name, value in vars(dataset).items()
        if isinstance(value, plain) and not name.startswith("_") and name not in NO_EFFECT
    }
    modules = {base.__module__ for base in mine} | {_decoder_module(dataset)}
    return RawState(files, options, {name: _sha256(name) for name in sorted(modules) if is_foreign(name)})


def recorded_state(folder: Path) -> RawState | None:
    """Return the state that was recorded with a prepared set, None if there is no readable record."""
    try:
        return RawState(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def decoder_is_ours(dataset: ImageDataset) -> bool:
    """Return whether the images are decoded by code of this package."""
    return not is_foreign(_decoder_module(dataset))


def changes(before: RawState | None, now: RawState) -> str:
    """Return what has changed, for a message; empty if nothing has."""
    if before is None:
        return "it is not recorded from which raw files it was prepared"
    old, new = before.files, now.files
    groups = {
        "raw files changed": [name for name in new if name in old and old[name] != new[name]],
        "raw files new": [name for name in new if name not in old],
        "raw files gone": [name for name in old if name not in new],
        "options changed": _different(before.options, now.options),
        "modules edited": _different(before.code, now.code),
    }
    return "; ".join(f"{what}: {len(names)} ({some(names, 3)})" for what, names in groups.items() if names)


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def is_foreign(module: str) -> bool:
    """Return whether a module is a user's: neither this package's nor the standard library's."""
    top = module.partition(".")[0]
    return top != OURS and top not in sys.stdlib_module_names


def _decoder_module(dataset: ImageDataset) -> str:
    defined_in = next(base for base in type(dataset).__mro__ if "decoder" in vars(base))
    if not is_foreign(defined_in.__module__):
        return OURS
    return str(getattr(dataset.decoder(dataset.size_for(64)), "__module__", defined_in.__module__))


def _sha256(module: str) -> str:
    """Return the hash of a module's file, empty for one without a file (an interactive session)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""
