"""The details section of a run: what it was made with, on what, and how its solves went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._entries import FALL_BACKS, Entry
from ._settings import Difference, UsualSettings, plain
from ._table import as_number, number_text

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Details:
    """What is unfolded for one run.

    Attributes:
        entry: The run.
        differences: Its configuration against the usual one.
        sections: Headings with names and values; empty ones are not shown.
    """

    entry: Entry
    differences: list[Difference]
    sections: list[tuple[str, Pairs]]

    @property
    def mark(self) -> str:
        """Style class of the state."""
        return self.entry.state

    @property
    def no_difference(self) -> str:
        """What is said where no setting differs."""
        if self.entry.get("config") is None:
            return "Its configuration is not known here."
        return "As usual in every entry."


def details(entry: Entry, usual: UsualSettings) -> Details:
    """Return the details of a run.

    Args:
        entry: The run.
        usual: What the runs of the page have in common.
    """
    sections = [
        ("Given on the command line", _given(entry)),
        ("Provenance", _provenance(entry)),
        ("Data", _data(entry)),
        ("Solves and fall-backs, summed over the epochs", _fall_backs(entry)),
        ("Time", _time(entry)),
    ]
    return Details(entry, usual.differences(entry), sections)


def _given(entry: Entry) -> Pairs:
    overrides = entry.get("overrides")
    words = " ".join(map(plain, overrides)) if isinstance(overrides, list) else None
    return _known(
        [("overrides", words), ("choices", _joined(entry.get("choices"), "=")), ("name", entry.get("name"))]
    )


def _provenance(entry: Entry) -> Pairs:
    state = entry.get("git", "dirty")
    dirty = "yes: files differed from the commit" if state is True else "no" if state is False else None
    starts = entry.get("starts")
    began = [start for start in starts if isinstance(start, Mapping)] if isinstance(starts, list) else []
    return _known(
        [
            ("run id", entry.get("id")),
            ("git commit", entry.get("git", "commit")),
            ("uncommitted changes", dirty or entry.get("git", "note")),
            ("hash of the changes", entry.get("git", "diff_sha256")),
            ("versions", _joined(entry.get("versions"), " ")),
            ("device", _device(entry)),
            ("CPU threads", entry.get("threads")),
            ("precision", _joined(entry.get("precision"), " ")),
            ("started (UTC)", ", ".join(str(start.get("time_utc")) for start in began)),
            ("platform", ", ".join(dict.fromkeys(str(start.get("platform")) for start in began))),
            ("resumed", f"{entry.get('resume_count')} times" if entry.get("resume_count") else None),
            ("started from", entry.get("init_from")),
        ]
    )


def _data(entry: Entry) -> Pairs:
    kind = entry.get("dataset", "kind")
    counts = entry.get("dataset", "summary", "counts")
    whole = (
        {name: counts.get(name) for name in ("train", "val", "test")} if isinstance(counts, Mapping) else None
    )
    return _known(
        [
            ("data set", entry.get("dataset", "name")),
            ("kind", "SYNTHETIC" if kind == "synthetic" else kind),
            ("image size", entry.get("dataset", "image_size")),
            ("images used", entry.get("dataset", "summary", "used")),
            ("in the prepared set", _joined(whole, " ")),
            ("manifest (SHA-256)", entry.get("dataset", "manifest_sha256")),
        ]
    )


def _fall_backs(entry: Entry) -> Pairs:
    counted = [(explains, entry.total(column)) for column, explains in FALL_BACKS.items()]
    return [(explains, str(count)) for explains, count in counted if count is not None]


def _time(entry: Entry) -> Pairs:
    found = entry.get("time")
    if not isinstance(found, Mapping):
        return []
    return [(str(name), number_text(as_number(value))) for name, value in found.items()]


def _device(entry: Entry) -> str | None:
    parts = [entry.get("device", "name"), entry.get("device", "kind")]
    return " · ".join(str(part) for part in parts if part) or None


def _joined(found: Any, between: str) -> str | None:
    if not isinstance(found, Mapping):
        return None
    return ", ".join(f"{name}{between}{plain(value)}" for name, value in found.items() if value is not None)


def _known(pairs: list[tuple[str, Any]]) -> Pairs:
    return [(name, plain(value)) for name, value in pairs if value not in (None, "")]
