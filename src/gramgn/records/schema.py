"""The schema of run.json: its entries, their types, and the one check that a record is whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gramgn.errors import InputError
from gramgn.records.columns import look_up

FORMAT = 1
STATES = ("running", "done", "diverged", "failed", "interrupted")
WAITING = "waiting"
"""The state of a job that has not begun, in the table of runs only."""

ENTRIES: Mapping[str, type] = {
    "format": int,
    "id": str,  # ties checkpoints to the run; kept when it is resumed
    "state": str,  # one of STATES
    "error": dict,  # why it failed, stopped or diverged; null if it did not
    "error.type": str,
    "error.message": str,
    "name": str,
    "group": str,  # folder name of its sweep
    "choices": dict,  # the option chosen in each configuration group
    "choices.experiment": str,
    "choices.sweep": str,
    "dataset": dict,
    "dataset.name": str,
    "dataset.kind": str,  # real or synthetic
    "dataset.unit": str,
    "dataset.image_size": int,
    "dataset.manifest_sha256": str,
    "dataset.summary": dict,
    "dataset.summary.used": int,  # number of images in all splits
    "model": dict,
    "model.name": str,
    "optimizer": dict,
    "optimizer.name": str,
    "config": dict,  # resolved, without paths of the machine
    "config.dataset": dict,
    "config.model": dict,
    "config.optimizer": dict,
    "config.trainer": dict,
    "config.trainer.epochs": int,
    "config.trainer.scale": str,
    "overrides": list,
    "seed": int,
    "init_from": str,
    "scaling": dict,  # of targets and pixels
    "git": dict,
    "git.commit": str,
    "git.diff_sha256": str,
    "versions": dict,
    "device": dict,
    "device.kind": str,
    "device.name": str,
    "threads": int,
    "ranks": int,  # number of processes that trained together
    "kernels": str,  # the compiled kernels of the optimizer, or "off"; "avx512 then off" after such a resumption
    "engine": dict,  # what the optimizer's engine chose: see `GramGaussNewton.choices`
    "precision": dict,
    "starts": list,  # one entry per start: time, platform, git, versions, the scheduler's job
    "resume_count": int,
    "time": dict,  # seconds
    "wandb": dict,
    "theory": dict,  # sizes and predictions of `gramgn.theory.Observer`, with trainer.theory_every
    "best": dict,  # the epoch of the least validation loss
}
"""Entries of run.json that this program reads, by dotted name. Each may be null or missing unless a reader needs it."""

START_ENTRIES: Mapping[str, type] = {
    "time_utc": str,
    "git": dict,
    "git.commit": str,
    "git.diff_sha256": str,
}

_WORDS = {dict: "a mapping", list: "a list", str: "a text", int: "a whole number"}


def check_record(record: Any, source: str, needed: Iterable[str] = ()) -> None:
    """Check that the content of run.json is whole and has the `needed` entries, given by dotted names.

    Raises:
        InputError: The format or the state is unknown, an entry has another type, or a needed one is missing.
    """
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("state") not in STATES:
        found = record if isinstance(record, dict) else {}
        raise InputError(
            f"{source} has format {found.get('format')!r} and state {found.get('state')!r}; this version reads "
            f"format {FORMAT} with a state out of {', '.join(STATES)}"
        )
    _check_types(record, ENTRIES, source)
    for start in record.get("starts") or []:
        if not isinstance(start, Mapping):
            raise InputError(
                f"{source} is damaged: its entry 'starts' holds {str(start)[:40]!r}, not {_WORDS[dict]}. "
                "Put the original back, or run again"
            )
        _check_types(start, START_ENTRIES, source, "starts[].")
    for name in needed:
        if look_up(record, name) is None:
            raise InputError(
                f"{source} has no entry '{name}': it was edited or damaged. Put the original back, or run again"
            )


def _check_types(tree: Any, entries: Mapping[str, type], source: str, prefix: str = "") -> None:
    for name, kind in entries.items():
        value = look_up(tree, name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise InputError(
                f"{source} is damaged: its entry '{prefix}{name}' is {str(value)[:40]!r}, not {_WORDS[kind]}. "
                "Put the original back, or run again"
            )
