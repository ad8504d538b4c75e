"""Whether run.json has the shape that figures rely on: whatever stands there, a damaged one is named, not a crash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gramgn.errors import InputError

_MAPPINGS = (
    *("choices", "dataset", "dataset.summary", "model", "optimizer", "config", "config.model"),
    *("config.optimizer", "config.trainer", "device", "git"),
)
_NUMBERS = ("seed", "threads", "dataset.image_size", "dataset.summary.used", "config.trainer.epochs")
_TEXTS = (
    *("choices.experiment", "choices.sweep", "dataset.name", "dataset.kind", "dataset.unit"),
    *("dataset.manifest_sha256", "model.name", "optimizer.name", "config.trainer.scale"),
    *("device.kind", "device.name", "git.commit", "git.diff_sha256"),
)


def check_shape(record: Mapping[str, Any]) -> None:
    """Check that what is there is of the right kind; entries may be missing or null.

    Args:
        record: Content of ``run.json``.

    Raises:
        InputError: An entry is of another kind; the message names it.
    """
    for name in _MAPPINGS:
        _demand(name, _at(record, name), Mapping, "a mapping")
    for name in _NUMBERS:
        _demand(name, _at(record, name), int, "a whole number")
    for name in _TEXTS:
        _demand(name, _at(record, name), str, "a text")
    for name in ("starts", "overrides"):
        _demand(name, record.get(name), list, "a list")
    for start in record.get("starts") or []:
        if not isinstance(start, Mapping):
            raise InputError(f"its run.json is damaged: starts has {start!r} in it, not a mapping")
        _demand("starts[].time_utc", start.get("time_utc"), str, "a text")
        git = start.get("git")
        _demand("starts[].git", git, Mapping, "a mapping")
        for name in ("commit", "diff_sha256"):
            _demand(f"starts[].git.{name}", (git or {}).get(name), str, "a text")


def _at(record: Mapping[str, Any], name: str) -> Any:
    value: Any = record
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _demand(name: str, value: Any, kind: type, words: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise InputError(f"its run.json is damaged: {name} is {str(value)[:40]!r}, not {words}")
