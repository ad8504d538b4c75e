"""Preparing: decode every image once, in parallel, split, and store one array.

The set is built in a hidden folder, which is renamed when it is complete: a folder with the name of a prepared set is
whole, also after kill -9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import PIL

from gramgn.data.decode import DEEP_COLOUR, DEEP_MAX, FRAMES, Decode, file_of
from gramgn.data.prepared import (
    COLUMNS,
    FILES,
    IMAGES,
    MANIFEST,
    META,
    UNUSED,
    PreparedSet,
    file_facts,
    identity,
    open_prepared,
    table_text,
)
from gramgn.data.raw_state import RawState, changes, decoder_is_ours, recorded_state
from gramgn.data.scan import HIDDEN, some
from gramgn.data.split import split_samples
from gramgn.data.types import SPLITS, Decoded, Index, Item, Unused
from gramgn.errors import DataError, counted
from gramgn.files import building, flush, write_text
from gramgn.progress import say, track
from gramgn.workers import available_cores, map_in_processes

if TYPE_CHECKING:
    import pandas as pd

    from gramgn.data.dataset import ImageDataset

BYTES_PER_WORKER = 16 * 2**20
BYTES_PER_CHUNK = 4 * 2**20
MAX_CHUNK = 64
MAX_NAMED = 10
FEW_LEVELS = 127

Result = Decoded | str
"""A decoded sample, or the message why there is none."""


def prepare_set(dataset: ImageDataset, image_size: int, index: Index, state: RawState) -> Path:
    """Prepare a set unless it is there already, and return its folder.

    Args:
        dataset: The data set with its options.
        image_size: Side of the images that was asked for, in pixels.
        index: The raw data.
        state: What can be seen of the raw data, as it was before it was indexed.

    Raises:
        DataError: Two items of one key, a target that is not finite, files that cannot be decoded
            (`on_bad_image="error"`), a full disk, or a folder that cannot be written.
    """
    folder, command = dataset.prepared_folder(image_size), dataset.command(image_size)
    index = _plausible(dataset, replace(index, items=[_checked(dataset.name, item) for item in index.items]))
    items = sorted(index.items, key=lambda item: item.key)
    for item, following in pairwise(items):
        if item.key == following.key:
            raise DataError(
                f"dataset {dataset.name}: {item.path} and {following.path} share the key {item.key!r}; rename one"
            )
    sizes = {file: _size_of(dataset.root / file) for file in {file_of(item.path) for item in items}}
    # The listing decides the content without decoding: keys, labels and file sizes.
    listing = [
        [item.key, item.path, sizes[file_of(item.path)], item.target, item.group, item.sex, item.official]
        for item in items
    ]
    listing_sha256 = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    shape = (len(items), dataset.stored_channels, *[dataset.size_for(image_size)] * 2)
    with building(folder, "dataset.prepared_root", math.prod(shape), "preparing") as new:
        if _is_current(dataset, folder, listing_sha256, command, state):
            return folder
        new.mkdir()
        rows, skipped = _decode(dataset, items, sum(sizes.values()), shape, new / IMAGES)
        if skipped and (dataset.on_bad_image == "error" or not rows):
            named = "".join(f"\n  {entry.reason}" for entry in skipped[:MAX_NAMED])
            more = f"\n  ... and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
            raise DataError(
                f"dataset {dataset.name}: {len(skipped)} of {len(items)} images cannot be used:{named}{more}\n"
                f"Download them again, or leave them out with dataset.on_bad_image=skip (recorded in every run). "
                f"Then run again: {command}"
            )
        meta = _finish(dataset, index, rows, skipped, shape, new)
        meta |= {"listing_sha256": listing_sha256}
        meta |= {"files": {name: file_facts(new / name) for name in FILES}}
        write_text(new / META, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
        state.write(new)
    _report(open_prepared(folder, rebuild=command))
    return folder


def _checked(name: str, item: Item) -> Item:
    """Return an item with its target as a Python float, or raise DataError naming what a user's class got wrong."""
    if not isinstance(item.key, str) or not isinstance(item.path, str):
        raise DataError(f"dataset {name}: {item.path!r} with the key {item.key!r}: both must be text (str)")
    target: Any = item.target
    if not isinstance(target, Real) or not math.isfinite(target):
        raise DataError(f"dataset {name}: {item.path} has the target {target!r}; must be a finite number")
    return replace(item, target=float(target))


def _plausible(dataset: ImageDataset, index: Index) -> Index:
    """Return the index without the samples whose target cannot be right."""
    low, high = dataset.target_range or dataset.plausible
    outside = [item for item in index.items if not low <= item.target <= high]
    if len(outside) == len(index.items):
        raise DataError(
            f"dataset {dataset.name}: all {len(outside)} targets are outside {low:g} to {high:g} {dataset.unit}, e.g. "
            f"{outside[0].target:g} of {outside[0].path}. dataset.target_range=[<low>,<high>] sets another range"
        )
    reason = f"target outside {low:g} to {high:g} {dataset.unit} (dataset.target_range)"
    items = [item for item in index.items if low <= item.target <= high]
    return replace(
        index, items=items, unused=[*index.unused, *(Unused(each.path, reason) for each in outside)]
    )


def _size_of(path: Path) -> int:
    """Return a file's size; 0 if it cannot be read: decoding will report the reason."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def decode_all(
    decode: Decode, items: Sequence[Item], num_bytes: int, workers: int | None
) -> Generator[tuple[Item, Result], None, None]:
    """Decode items, in this process or in several, and yield them in order with their result.

    Args:
        decode: What decodes.
        items: What to decode.
        num_bytes: Total size of the raw files; little work is not worth the start of processes.
        workers: Number of processes; None for all cores, fewer for little work.

    Raises:
        DataError: A worker process died.
    """
    wanted = min(available_cores(), num_bytes // BYTES_PER_WORKER) if workers is None else workers
    # The images of an npz file are one array in memory, which worker processes would only copy.
    if wanted <= 1 or len(items) <= 1 or file_of(items[0].path) != items[0].path:
        for item in items:
            yield item, _decoded(decode, item)
        return
    even = -(-len(items) // (4 * wanted))
    length = max(1, min(MAX_CHUNK, even, BYTES_PER_CHUNK * len(items) // max(num_bytes, 1)))
    chunks = [items[start : start + length] for start in range(0, len(items), length)]
    died = "a worker process of prepare died."
    results = map_in_processes(partial(_decode_chunk, decode), chunks, wanted, died=died)
    for chunk, decoded in zip(chunks, results, strict=True):
        yield from zip(chunk, decoded, strict=True)


def _decode_chunk(decode: Decode, items: Sequence[Item]) -> list[Result]:
    return [_decoded(decode, item) for item in items]


def _decoded(decode: Decode, item: Item) -> Result:
    try:
        return decode(item)
    except DataError as error:
        return str(error)


def _is_current(dataset: ImageDataset, folder: Path, listing: str, rebuild: str, state: RawState) -> bool:
    """Return whether a whole set of exactly these raw files is there; report the result."""
    if not folder.is_dir():
        return False
    try:
        prepared = open_prepared(folder, rebuild=rebuild)
    except DataError as error:
        say(f"{error}\nrebuilding it")
        return False
    before = recorded_state(folder)
    changed = changes(before, state)
    if changed:
        say(f"the raw data in {dataset.root} has changed since {folder} was prepared: {changed}")
    images = {file_of(path) for path in prepared.manifest["path"]}
    same_images = before is not None and all(
        before.files.get(name) == state.files.get(name) for name in images
    )
    if prepared.meta["listing_sha256"] != listing or (
        changed and not (same_images and decoder_is_ours(dataset))
    ):
        say("rebuilding it")
        return False
    if prepared.meta["skipped"] and dataset.on_bad_image == "error":
        say(f"{folder} lacks {len(prepared.meta['skipped'])} files that could not be decoded; rebuilding it")
        return False
    if changed:
        say("samples and targets are the same")
        state.write(folder)
    say(f"already prepared: {folder}")
    return True


def _decode(
    dataset: ImageDataset, items: list[Item], num_bytes: int, shape: tuple[int, ...], path: Path
) -> tuple[list[dict[str, Any]], list[Unused]]:
    """Write the decoded images to `path`; return the manifest's rows, and the files that cannot be decoded.

    The array is written as a stream: on a full disk that raises an error, where a memory map would crash.
    """
    rows: list[dict[str, Any]] = []
    skipped: list[Unused] = []
    size = shape[-1]
    decoding = decode_all(dataset.decoder(size), items, num_bytes, dataset.workers)
    with contextlib.closing(decoding) as results, path.open("wb") as stream:
        _write_header(stream, shape)
        label = f"preparing {dataset.name} at {size}x{size}"
        for item, result in track(results, total=len(items), label=label, unit="images"):
            if isinstance(result, str):
                skipped.append(Unused(item.path, result))
                continue
            stream.write(result.pixels.tobytes())
            rows.append({**vars(item), **vars(result), "pixels": None})
        flush(stream)
    return rows, skipped


def _write_header(stream: IO[bytes], shape: tuple[int, ...]) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)


def _finish(
    dataset: ImageDataset,
    index: Index,
    rows: list[dict[str, Any]],
    skipped: list[Unused],
    shape: tuple[int, ...],
    new: Path,
) -> dict[str, Any]:
    """Split the samples, write the tables, and return the content of `meta.json`."""
    import pandas as pd

    # Messages hold absolute paths, which must not be recorded.
    below = re.escape(f"{dataset.root}") + r"[\\/]?"
    skipped = [Unused(entry.path, re.sub(below, "", entry.reason)) for entry in skipped]
    table = pd.DataFrame(rows).astype({name: kind for name, kind in COLUMNS.items() if name != "split"})
    keys, groups, hashes, official = (table[name].tolist() for name in ("key", "group", "sha256", "official"))
    table["split"] = split_samples(keys, groups, hashes, official, dataset.split_seed)
    kept = table["split"] != ""
    reason = "same bytes or person as a sample of a published split"
    unused = [*index.unused, *(Unused(path, reason) for path in table["path"][~kept])]
    manifest = table.loc[kept, list(COLUMNS)]
    if manifest.empty:
        raise DataError(
            f"dataset {dataset.name}: no sample of {dataset.root} is left after removing duplicates"
        )
    if len(manifest) < len(index.items):
        _keep_images(new / IMAGES, (len(table), *shape[1:]), kept.to_numpy())
    write_text(new / MANIFEST, table_text(manifest))
    left_out = sorted((entry.path, entry.reason) for entry in [*unused, *skipped])
    write_text(new / UNUSED, table_text(pd.DataFrame(left_out, columns=["path", "reason"])))
    targets = manifest["target"].to_numpy()
    train = targets[(manifest["split"] == "train").to_numpy()]
    by_reason: dict[str, list[str]] = {}
    for entry in unused:
        by_reason.setdefault(entry.reason, []).append(entry.path)
    return {
        "format": 1,
        "name": dataset.name,
        "kind": dataset.kind,
        "unit": dataset.unit,
        "image_size": shape[-1],
        "channels": shape[1],
        "resize": dataset.resize,
        "filter": "bilinear, antialiased",
        "split_seed": dataset.split_seed,
        "settings": dataset.settings(),
        "counts": _counts(manifest),
        "targets": {
            "train_mean": float(train.mean()) if len(train) else None,
            "train_sd": float(train.std()) if len(train) else None,
            "min": float(targets.min()),
            "max": float(targets.max()),
        },
        "upscaled": int((manifest[["width", "height"]].min(axis=1) < shape[-1]).sum()),
        "duplicates": _duplicates(table),
        "unused": [
            {"reason": reason, "count": len(paths), "examples": sorted(paths)[:MAX_NAMED]}
            for reason, paths in sorted(by_reason.items())
        ],
        "skipped": [vars(entry) for entry in skipped],
        "notes": [*index.notes, *_image_notes(table, dataset.grey_range)],
        "layout": index.facts,
        "manifest_sha256": identity(manifest),
        "versions": {"pillow": PIL.__version__, "numpy": np.__version__, "python": platform.python_version()},
    }


def _image_notes(table: pd.DataFrame, grey_range: tuple[int, int] | None) -> list[str]:
    """Return notes on images of which something is lost: grey levels of 16-bit images, frames."""
    notes = []
    is_colour = table["note"].str.contains(DEEP_COLOUR)
    remedy = "dataset.grey_range=[0,{}] scales them by the range that is used"
    for brightest, kind, advice in (
        (table["brightest"][~is_colour & (grey_range is None)], "16-bit image", remedy),
        (
            table["brightest"][is_colour],
            "16-bit colour image",
            "convert them to 8 bits of the range that is used",
        ),
    ):
        most, number = brightest.max(), int((brightest > 0).sum())
        levels = (most * 255 + DEEP_MAX // 2) // DEEP_MAX + 1 if number else math.inf
        if levels <= FEW_LEVELS:
            notes.append(
                f"{counted(number, kind)} with no value above {most:,} of {DEEP_MAX:,}: they come out with {levels} "
                f"grey levels of 256. {advice.format(most)}"
            )
    if num_frames := int(table["note"].str.contains(FRAMES).sum()):
        notes.append(f"{counted(num_frames, 'image')} with several frames: the first frame is used")
    return notes


def _keep_images(path: Path, shape: tuple[int, ...], kept: np.ndarray) -> None:
    """Rewrite the array of `shape` without the images that are not kept."""
    decoded = np.memmap(path, np.uint8, "r", path.stat().st_size - math.prod(shape), shape)
    shorter = path.with_name(f"{path.name}.kept")
    with shorter.open("wb") as stream:
        _write_header(stream, (int(kept.sum()), *shape[1:]))
        for row in np.flatnonzero(kept):
            stream.write(decoded[row].tobytes())
        flush(stream)
    del decoded  # Windows does not replace a mapped file.
    shorter.replace(path)


def _counts(manifest: pd.DataFrame) -> dict[str, Any]:
    counts: dict[str, Any] = {"total": len(manifest)}
    counts |= {split: int((manifest["split"] == split).sum()) for split in SPLITS}
    if not (manifest["sex"] != "").any():
        return counts
    by_sex = (manifest["split"] + " " + manifest["sex"].replace("", "unknown")).value_counts().sort_index()
    return {**counts, "by_sex": {str(name): int(number) for name, number in by_sex.items()}}


def _duplicates(table: pd.DataFrame) -> dict[str, Any]:
    """Count samples with equal bytes, and those among them whose targets differ."""
    copies = table[table.duplicated("sha256", keep=False)]
    same = [group for _, group in copies.groupby("sha256", sort=False)]
    conflicting = [group for group in same if group["target"].nunique() > 1]
    return {
        "samples": sum(map(len, same)),
        "sets_of_equal_bytes": len(same),
        "with_different_targets": len(conflicting),
        "examples": [group["key"].tolist() for group in (conflicting or same)[:MAX_NAMED]],
    }


def _report(prepared: PreparedSet) -> None:
    """Report what was prepared, what was left out and why, and what looks odd."""
    meta, counts = prepared.meta, prepared.meta["counts"]
    splits = ", ".join(f"{split} {counts[split]}" for split in SPLITS)
    say(f"prepared {counts['total']} images ({splits}) in {prepared.folder}")
    for note in meta["notes"]:
        say(f"  {note}")
    for entry in meta["unused"]:
        if entry["reason"] != HIDDEN:  # recorded, but nobody's concern
            say(f"  not used: {entry['count']} x {entry['reason']} ({some(entry['examples'], 3)})")
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
