"""What was sent to W&B already: ``uploads.json`` in the folder of a run or a sweep."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.records import Row, write_atomic

FILE = "uploads.json"
# A larger number has everything sent again: what is sent, or under which keys, has changed.
_LAYOUT = 1


@dataclass(frozen=True)
class Target:
    """Where something is sent.

    Attributes:
        mode: ``"online"``, or ``"offline"`` for W&B's files.
        project: W&B project.
        entity: W&B team or user; None is the account's default.
        group: The sweep.
    """

    mode: str
    project: str
    entity: str | None
    group: str | None

    def digest(self, *content: Any) -> str:
        """Return a hash that changes whenever the content, the target or the server does.

        Args:
            *content: JSON types, with NaN and infinities.
        """
        # The server only enters the hash: its name is nobody's business who reads the file.
        server = os.environ.get("WANDB_BASE_URL", "") if self.mode == "online" else ""
        parts = [_LAYOUT, astuple(self), server, *content]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def run_target(
    run: Mapping[str, Any],
    mode: str,
    project: str | None = None,
    entity: str | None = None,
    group: str | None = None,
) -> Target:
    """Return where a run goes: what is not given is taken from its own records.

    Args:
        run: The content of ``run.json``.
        mode: ``"online"`` or ``"offline"``.
        project: W&B project.
        entity: W&B team or user.
        group: The sweep.
    """
    own = (run.get("config") or {}).get("tracking") or {}
    return Target(
        mode,
        project or own.get("project") or "gramgn",
        entity or own.get("entity"),
        group or run.get("group"),
    )


def run_digest(target: Target, run: Mapping[str, Any], rows: list[Row]) -> str:
    """Return a hash of a whole run and where it goes.

    Args:
        target: Where it goes.
        run: The content of ``run.json``; what the upload itself changes there does not count.
        rows: Those of ``metrics.csv``.
    """
    return target.digest({key: value for key, value in run.items() if key != "wandb"}, rows)


def was_sent(folder: Path, mode: str, digest: str) -> bool:
    """Tell whether exactly this was the last thing sent in that mode.

    Args:
        folder: The run's or sweep's folder.
        mode: ``"online"`` or ``"offline"``.
        digest: See :meth:`Target.digest`.
    """
    return bool((_read(folder).get(mode) or {}).get("sha256") == digest)


def mark_sent(folder: Path, mode: str, digest: str) -> None:
    """Note that this has arrived.

    Args:
        folder: The run's or sweep's folder.
        mode: ``"online"`` or ``"offline"``.
        digest: See :meth:`Target.digest`.
    """
    entry = {"sha256": digest, "time_utc": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
    _write(folder, _read(folder) | {mode: entry})


def stored_id(folder: Path) -> str | None:
    """Return the W&B id that is kept in the folder, or None."""
    found = _read(folder).get("id")
    return str(found) if found else None


def keep_id(folder: Path, run_id: str) -> None:
    """Keep a W&B id in the folder: before anything is sent under it, so that it is never sent under two."""
    _write(folder, _read(folder) | {"id": run_id})


def _read(folder: Path) -> dict[str, Any]:
    file = folder / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file} ({error}). Remove it: everything is then sent again") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} is damaged. Remove it: everything is then sent again")
    return found


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    write_atomic(folder / FILE, json.dumps(content, indent=2) + "\n")
