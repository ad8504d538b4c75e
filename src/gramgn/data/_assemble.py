"""Turning decoded samples into a finished set: split, array, manifest, and a JSON file of what was done."""

from __future__ import annotations

import csv
import io
import json
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from gramgn.data._files import flush, sha256_of, write_text
from gramgn.data._journal import Journal
from gramgn.data._manifest import Row, identity, to_csv
from gramgn.data._plan import Plan
from gramgn.data._prepared import FILES, IMAGES, MANIFEST, META, UNUSED
from gramgn.data._split import split_samples
from gramgn.data._types import SPLITS, Index, Item, Unused
from gramgn.errors import DataError

BLOCK = 1024
MAX_EXAMPLES = 10


@dataclass(frozen=True)
class Skipped:
    """An item that could not be decoded, and the message why."""

    item: Item
    message: str


def assemble(
    plan: Plan, index: Index, listing: str, skipped: list[Skipped], journal: Journal, new: Path
) -> None:
    """Write a finished set into the folder ``new``.

    Args:
        plan: What was asked for.
        index: The raw data, items sorted by key.
        listing: Hash of the raw listing, recorded so that a change can be seen.
        skipped: Items that could not be decoded.
        journal: The decoded samples.
        new: Folder to create.

    Raises:
        DataError: Nothing is left after removing samples that would leak between published splits.
    """
    left_out = {entry.item.key for entry in skipped}
    skipped_facts = [_skipped_fact(entry, plan.root) for entry in skipped]
    rows = _rows([item for item in index.items if item.key not in left_out], journal, plan.split_seed)
    leaking = [
        Unused(row.path, "same bytes or person as a sample of a published split")
        for row in rows
        if not row.split
    ]
    duplicates = _duplicates(rows)
    rows = [row for row in rows if row.split]
    if not rows:
        raise DataError(f"dataset {plan.name}: no sample of {plan.root} is left after removing duplicates")
    unused = [*index.unused, *leaking]
    new.mkdir()
    pixels = _write_images(new / IMAGES, journal, rows)
    write_text(new / MANIFEST, to_csv(rows))
    write_text(new / UNUSED, _unused_csv(unused, skipped_facts))
    meta = {
        "format": 1,
        "name": plan.name,
        "kind": plan.kind,
        "unit": plan.unit,
        "image_size": plan.size,
        "channels": plan.channels,
        "resize": plan.resize,
        "filter": "bilinear, antialiased",
        "split_seed": plan.split_seed,
        "settings": plan.settings,
        "counts": _counts(rows),
        "targets": _target_facts(rows),
        "histogram": _histogram(rows),
        "pixels": pixels,
        "upscaled": sum(min(row.width, row.height) < plan.size for row in rows),
        "duplicates": duplicates,
        "unused": _grouped(unused),
        "skipped": skipped_facts,
        "notes": index.notes,
        "layout": index.facts,
        "manifest_sha256": identity(rows),
        "listing_sha256": listing,
        "files": {name: _file_facts(new / name) for name in FILES},
        "versions": {"pillow": PIL.__version__, "numpy": np.__version__, "python": platform.python_version()},
    }
    write_text(new / META, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")


def _rows(items: list[Item], journal: Journal, seed: int) -> list[Row]:
    entries = [journal.entry(item.key) for item in items]
    keys, groups = [item.key for item in items], [item.group for item in items]
    hashes, official = [entry.sha256 for entry in entries], [item.official for item in items]
    splits = split_samples(keys, groups, hashes, official, seed)
    return [
        Row(
            key=item.key,
            path=item.path,
            sha256=entry.sha256,
            target=item.target,
            group=item.group,
            sex=item.sex,
            split=split,
            width=entry.width,
            height=entry.height,
            mode=entry.mode,
            note=entry.note,
        )
        for item, entry, split in zip(items, entries, splits, strict=True)
    ]


def _write_images(path: Path, journal: Journal, rows: list[Row]) -> dict[str, Any]:
    """Write the array in the order of the rows; return mean and sd of the train split, white being 1.

    The file is written as a stream: on a full disk that is an error, where a memory map would be a crash.
    """
    decoded = journal.pixels()
    order = np.array([journal.row(row.key) for row in rows])
    is_train = np.array([row.split == "train" for row in rows])
    total, squares = np.zeros(journal.shape[0]), np.zeros(journal.shape[0])
    with path.open("wb") as stream:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(rows), *journal.shape)}
        np.lib.format.write_array_header_1_0(stream, header)
        for start in range(0, len(rows), BLOCK):
            block: NDArray[np.uint8] = decoded[order[start : start + BLOCK]]
            stream.write(block.tobytes())
            train = block[is_train[start : start + BLOCK]].astype(np.float64)
            total += train.sum((0, 2, 3))
            squares += (train**2).sum((0, 2, 3))
        flush(stream)
    num = max(1, int(is_train.sum()) * journal.shape[1] * journal.shape[2])
    mean = total / num
    sd = np.sqrt(np.maximum(squares / num - mean**2, 0.0))
    return {"train_mean": [round(v / 255, 6) for v in mean], "train_sd": [round(v / 255, 6) for v in sd]}


def _counts(rows: list[Row]) -> dict[str, Any]:
    by_split = Counter(row.split for row in rows)
    by_sex = Counter(f"{row.split} {row.sex or 'unknown'}" for row in rows)
    counts: dict[str, Any] = {"total": len(rows), **{split: by_split[split] for split in SPLITS}}
    return {**counts, "by_sex": dict(sorted(by_sex.items()))} if any(row.sex for row in rows) else counts


def _target_facts(rows: list[Row]) -> dict[str, Any]:
    """Mean and sd of the train split, and the range of all."""
    train = np.array([row.target for row in rows if row.split == "train"])
    return {
        "train_mean": float(train.mean()) if len(train) else None,
        "train_sd": float(train.std()) if len(train) else None,
        "min": min(row.target for row in rows),
        "max": max(row.target for row in rows),
    }


def _histogram(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Count samples by target in whole units, by split and sex: a split that lacks ages is seen."""
    histogram: dict[int, Counter[str]] = defaultdict(Counter)
    for row in rows:
        histogram[round(row.target)][f"{row.split} {row.sex}".rstrip()] += 1
    return {str(target): dict(sorted(counter.items())) for target, counter in sorted(histogram.items())}


def _duplicates(rows: list[Row]) -> dict[str, Any]:
    """Count samples with equal bytes, and those among them whose targets differ."""
    by_hash: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_hash[row.sha256].append(row)
    same = [group for group in by_hash.values() if len(group) > 1]
    conflicting = [group for group in same if len({row.target for row in group}) > 1]
    return {
        "samples": sum(map(len, same)),
        "sets_of_equal_bytes": len(same),
        "with_different_targets": len(conflicting),
        "examples": [[row.key for row in group] for group in (conflicting or same)[:MAX_EXAMPLES]],
    }


def _grouped(unused: Sequence[Unused]) -> list[dict[str, Any]]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for entry in unused:
        by_reason[entry.reason].append(entry.path)
    return [
        {"reason": reason, "count": len(paths), "examples": sorted(paths)[:MAX_EXAMPLES]}
        for reason, paths in sorted(by_reason.items())
    ]


def _unused_csv(unused: Sequence[Unused], skipped: list[dict[str, str]]) -> str:
    """List every file or label row that takes no part, with the reason."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("path", "reason"))
    cases = [(entry.path, entry.reason) for entry in unused]
    writer.writerows(sorted([*cases, *((fact["path"], fact["reason"]) for fact in skipped)]))
    return stream.getvalue()


def _skipped_fact(entry: Skipped, root: Path) -> dict[str, str]:
    # Messages hold absolute paths, which are nobody else's business.
    return {"path": entry.item.path, "reason": re.sub(re.escape(f"{root}") + r"[\\/]?", "", entry.message)}


def _file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
