"""Preparing: decode every image once, in parallel, so that it can be interrupted at any moment and run again.

Work goes on in ``<folder>.partial`` (see `gramgn.data._journal`); the finished set is written to
``<folder>.new`` and renamed. Whatever has the set's own name is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path

import PIL

from gramgn.data._assemble import Skipped, assemble
from gramgn.data._decode import Decoder
from gramgn.data._files import locked, replace_folder, writing
from gramgn.data._journal import Journal, Stamp
from gramgn.data._plan import Plan
from gramgn.data._prepared import PreparedSet, open_prepared, prepared_exists
from gramgn.data._types import SPLITS, Decoded, Index, Item
from gramgn.data._workers import decode_all
from gramgn.errors import DataError
from gramgn.progress import say, track

MAX_NAMED = 10
NUM_EXAMPLES = 3
UNREADABLE: Stamp = (0, 0)


def prepare_set(plan: Plan, index: Index, decoder: Decoder) -> Path:
    """Prepare a set, or find that it is there already.

    Args:
        plan: What, how and where.
        index: The raw data, items sorted by key.
        decoder: What turns an item into pixels.

    Returns:
        The prepared folder.

    Raises:
        DataError: Files that cannot be decoded (``on_bad_image="error"``), a full disk, a folder that cannot
            be written. What was decoded is kept for the next start.
    """
    stamps = _stamps(plan.root, index.items)
    listing = _listing(index.items, stamps)
    image_bytes = plan.channels * plan.size**2
    # Once in the journal, once in the finished set.
    with writing(plan.folder.parent, "dataset.prepared_root", 2 * len(index.items) * image_bytes):
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(plan.folder.with_name(f".{plan.folder.name}.lock")):
            if _is_current(plan, listing):
                return plan.folder
            partial = plan.folder.with_name(plan.folder.name + ".partial")
            header = {"pillow": PIL.__version__, "resize": plan.resize, "settings": plan.settings}
            with Journal(partial, plan.shape, header) as journal:
                skipped = _decode_missing(plan, index, stamps, decoder, journal)
                new = plan.folder.with_name(plan.folder.name + ".new")
                shutil.rmtree(new, ignore_errors=True)
                assemble(plan, index, listing, skipped, journal, new)
                replace_folder(new, plan.folder)
            shutil.rmtree(partial)
            _report(open_prepared(plan.folder, rebuild=plan.command))
    return plan.folder


def _report(prepared: PreparedSet) -> None:
    """Say what was prepared, what was left out and why, and what looks odd."""
    meta, counts = prepared.meta, prepared.meta["counts"]
    splits = ", ".join(f"{split} {counts[split]}" for split in SPLITS)
    say(f"prepared {counts['total']} images ({splits}) in {prepared.folder}")
    for note in meta["notes"]:
        say(f"  {note}")
    for entry in meta["unused"]:
        examples = ", ".join(entry["examples"][:NUM_EXAMPLES])
        more = ", ..." if entry["count"] > NUM_EXAMPLES else ""
        say(f"  not used: {entry['count']} x {entry['reason']} ({examples}{more})")
    if meta["skipped"]:
        say(f"  skipped: {len(meta['skipped'])} files that cannot be decoded, named in unused.csv there")
    equal = meta["duplicates"]
    if equal["sets_of_equal_bytes"]:
        say(
            f"  {equal['samples']} samples are copies of one another ({equal['sets_of_equal_bytes']} sets, "
            f"{equal['with_different_targets']} with different targets); copies are never in two splits"
        )
    if meta["upscaled"]:
        say(f"  {meta['upscaled']} images are smaller than {meta['image_size']} pixels and were enlarged")
    for split in SPLITS:
        if not counts[split]:
            say(f"  the {split} split is empty: too few images for the split rule")


def _is_current(plan: Plan, listing: str) -> bool:
    """Say whether a whole set of exactly these raw files is there; say so to people too."""
    if not prepared_exists(plan.folder):
        return False
    try:
        prepared: PreparedSet = open_prepared(plan.folder, rebuild=plan.command)
    except DataError as error:
        say(f"{error}\nmaking it anew")
        return False
    if prepared.listing_sha256 != listing:
        say(f"the raw files in {plan.root} have changed since {plan.folder} was prepared; making it anew")
        return False
    if prepared.num_skipped and plan.on_bad_image == "error":
        say(f"{plan.folder} lacks {prepared.num_skipped} files that could not be decoded; making it anew")
        return False
    say(f"already prepared: {plan.folder}")
    return True


def _decode_missing(
    plan: Plan, index: Index, stamps: dict[str, Stamp], decoder: Decoder, journal: Journal
) -> list[Skipped]:
    """Decode what the journal lacks; return what cannot be decoded, or raise DataError naming it."""
    pending = [item for item in index.items if journal.find(item, stamps[item.path]) is None]
    done = len(index.items) - len(pending)
    if done:
        say(f"going on after an interruption: {done} of {len(index.items)} images are decoded already")
    num_bytes = sum({_file_of(item): stamps[item.path][0] for item in pending}.values())
    skipped: list[Skipped] = []
    with contextlib.closing(decode_all(decoder, pending, num_bytes, plan.workers)) as results:
        label = f"preparing {plan.name} at {plan.size}x{plan.size}"
        for item, result in track(results, total=len(pending), label=label, unit="images"):
            if isinstance(result, Decoded):
                journal.append(item, stamps[item.path], result)
            else:
                skipped.append(Skipped(item, result))
    if skipped and (plan.on_bad_image == "error" or len(skipped) == len(index.items)):
        raise DataError(_bad_images_message(plan, skipped, len(index.items)))
    return skipped


def _bad_images_message(plan: Plan, skipped: list[Skipped], num_items: int) -> str:
    named = "".join(f"\n  {entry.message}" for entry in skipped[:MAX_NAMED])
    more = f"\n  ... and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
    return (
        f"dataset {plan.name}: {len(skipped)} of {num_items} images cannot be used:{named}{more}\n"
        f"Download them again, or leave them out with dataset.on_bad_image=skip (recorded in every run). "
        f"Then run again: {plan.command}; what was decoded is kept"
    )


def _file_of(item: Item) -> str:
    """Return the file that holds an item: many items of an npz share one."""
    before, separator, _ = item.path.partition(".npz#")
    return before + ".npz" if separator else item.path


def _stamps(root: Path, items: list[Item]) -> dict[str, Stamp]:
    """Return size and modification time of every item's file, by the item's path."""
    by_file: dict[str, Stamp] = {}
    stamps = {}
    for item in items:
        file = _file_of(item)
        if file not in by_file:
            try:
                status = (root / file).stat()
                by_file[file] = (status.st_size, status.st_mtime_ns)
            except OSError:
                by_file[file] = UNREADABLE  # the decoder says why, and the policy for bad images holds
        stamps[item.path] = by_file[file]
    return stamps


def _listing(items: list[Item], stamps: dict[str, Stamp]) -> str:
    """Hash what decides the content without decoding: keys, labels and file sizes."""
    rows = [
        [item.key, item.path, stamps[item.path][0], item.target, item.group, item.sex, item.official]
        for item in items
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
