"""Preparing: decode every image once, in parallel, split, and store one array.

The set is written to `<folder>.new`, which is renamed when it is complete: whatever has the set's own name is whole,
also after kill -9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Generator, Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import PIL

from gramgn.data.decode import Decode, file_of
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
from gramgn.data.split import split_samples
from gramgn.data.types import SPLITS, Decoded, Index, Item, Unused
from gramgn.errors import DataError
from gramgn.files import flush, replace_folder, write_text, writing
from gramgn.locks import locked
from gramgn.progress import say, track
from gramgn.workers import available_cores, check_main_guard, map_in_processes

if TYPE_CHECKING:
    import pandas as pd

    from gramgn.data.dataset import ImageDataset

BLOCK = 1024  # images copied at a time
BYTES_PER_WORKER = 16 * 2**20
BYTES_PER_CHUNK = 4 * 2**20
MAX_CHUNK = 64
MAX_NAMED = 10
NUM_EXAMPLES = 3

Result = Decoded | str
"""A decoded sample, or the message why there is none."""


def prepare_set(dataset: ImageDataset, image_size: int, index: Index) -> Path:
    """Prepare a set, or find that it is there already.

    Args:
        dataset: Its options, and where things are.
        image_size: Side of the images that was asked for, in pixels.
        index: The raw data.

    Returns:
        The prepared folder.

    Raises:
        DataError: Two items of one key, a target that is not finite, files that cannot be decoded
            (`on_bad_image="error"`), a full disk, or a folder that cannot be written.
    """
    check_main_guard()
    folder, size = dataset.prepared_folder(image_size), dataset.size_for(image_size)
    items = _checked(dataset.name, index.items)
    sizes = _file_sizes(dataset.root, items)
    listing = _listing(items, sizes)
    needed_bytes = len(items) * dataset.stored_channels * size**2
    with writing(folder.parent, "dataset.prepared_root", needed_bytes):
        folder.parent.mkdir(parents=True, exist_ok=True)
        busy = f"another process is preparing {folder.name}; waiting for it"
        with locked(folder.with_name(f".{folder.name}.lock"), busy, wait=True):
            if _is_current(dataset, folder, listing, dataset.command(image_size)):
                return folder
            new = folder.with_name(folder.name + ".new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            try:
                rows, skipped = _decode(dataset, image_size, items, sizes, new / IMAGES)
                meta = _finish(dataset, size, index, rows, skipped, new)
                meta |= {"listing_sha256": listing, "files": {name: file_facts(new / name) for name in FILES}}
                write_text(new / META, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
                replace_folder(new, folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            _report(open_prepared(folder, rebuild=dataset.command(image_size)))
    return folder


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
    results = map_in_processes(partial(_decode_chunk, decode), chunks, min(wanted, len(chunks)), died=died)
    for chunk, decoded in zip(chunks, results, strict=True):
        yield from zip(chunk, decoded, strict=True)


def _decode_chunk(decode: Decode, items: Sequence[Item]) -> list[Result]:
    return [_decoded(decode, item) for item in items]


def _decoded(decode: Decode, item: Item) -> Result:
    try:
        return decode(item)
    except DataError as error:
        return str(error)


def _checked(dataset: str, items: list[Item]) -> list[Item]:
    """Return the items sorted by key; raise DataError for a key used twice or a target that is not finite."""
    ordered = sorted(items, key=lambda item: item.key)
    for item, following in pairwise(ordered):
        if item.key == following.key:
            raise DataError(
                f"dataset {dataset}: {item.path} and {following.path} share the key {item.key!r}; rename one"
            )
    for item in ordered:
        if not isfinite(item.target):
            raise DataError(f"dataset {dataset}: {item.path} has the target {item.target}; must be finite")
    return ordered


def _is_current(dataset: ImageDataset, folder: Path, listing: str, rebuild: str) -> bool:
    """Return whether a whole set of exactly these raw files is there; report what is found."""
    if not folder.is_dir():
        return False
    try:
        prepared = open_prepared(folder, rebuild=rebuild)
    except DataError as error:
        say(f"{error}\nrebuilding it")
        return False
    if prepared.meta["listing_sha256"] != listing:
        say(f"the raw files in {dataset.root} have changed since {folder} was prepared; rebuilding it")
        return False
    if prepared.num_skipped and dataset.on_bad_image == "error":
        say(f"{folder} lacks {prepared.num_skipped} files that could not be decoded; rebuilding it")
        return False
    say(f"already prepared: {folder}")
    return True


def _decode(
    dataset: ImageDataset, image_size: int, items: list[Item], sizes: dict[str, int], path: Path
) -> tuple[list[dict[str, Any]], list[Unused]]:
    """Write the decoded images to `path`; return the manifest's rows, and the files that cannot be decoded.

    The array is written as a stream: on a full disk that raises an error, where a memory map would crash.
    """
    size = dataset.size_for(image_size)
    num_bytes = sum(sizes[file] for file in {file_of(item.path) for item in items})
    rows: list[dict[str, Any]] = []
    skipped: list[Unused] = []
    decoding = decode_all(dataset.decoder(size), items, num_bytes, dataset.workers)
    with contextlib.closing(decoding) as results, path.open("wb") as stream:
        _write_header(stream, (len(items), dataset.stored_channels, size, size))
        label = f"preparing {dataset.name} at {size}x{size}"
        for item, result in track(results, total=len(items), label=label, unit="images"):
            if isinstance(result, str):
                skipped.append(Unused(item.path, result))
                continue
            stream.write(result.pixels.tobytes())
            rows.append({**vars(item), **vars(result), "pixels": None})
        flush(stream)
    if skipped and (dataset.on_bad_image == "error" or not rows):
        raise DataError(_bad_images_message(dataset, image_size, skipped, len(items)))
    # Messages hold absolute paths, which must not be recorded.
    below = re.escape(f"{dataset.root}") + r"[\\/]?"
    return rows, [Unused(entry.path, re.sub(below, "", entry.reason)) for entry in skipped]


def _write_header(stream: IO[bytes], shape: tuple[int, ...]) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)


def _finish(
    dataset: ImageDataset,
    size: int,
    index: Index,
    rows: list[dict[str, Any]],
    skipped: list[Unused],
    new: Path,
) -> dict[str, Any]:
    """Split the samples, write the tables, and return what is recorded of the set."""
    import pandas as pd

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
        _keep_images(new / IMAGES, (len(table), dataset.stored_channels, size, size), kept.to_numpy())
    write_text(new / MANIFEST, table_text(manifest))
    left_out = sorted((entry.path, entry.reason) for entry in [*unused, *skipped])
    write_text(new / UNUSED, table_text(pd.DataFrame(left_out, columns=["path", "reason"])))
    return {
        "format": 1,
        "name": dataset.name,
        "kind": dataset.kind,
        "unit": dataset.unit,
        "image_size": size,
        "channels": dataset.stored_channels,
        "resize": dataset.resize,
        "filter": "bilinear, antialiased",
        "split_seed": dataset.split_seed,
        "settings": dataset.settings(),
        "counts": _counts(manifest),
        "targets": _target_facts(manifest),
        "histogram": _histogram(manifest),
        "upscaled": int((manifest[["width", "height"]].min(axis=1) < size).sum()),
        "duplicates": _duplicates(table),
        "unused": _grouped(unused),
        "skipped": [vars(entry) for entry in skipped],
        "notes": index.notes,
        "layout": index.facts,
        "manifest_sha256": identity(manifest),
        "versions": {"pillow": PIL.__version__, "numpy": np.__version__, "python": platform.python_version()},
    }


def _keep_images(path: Path, shape: tuple[int, ...], kept: np.ndarray) -> None:
    """Rewrite the array without the images that are not kept."""
    with path.open("rb") as stream:
        np.lib.format.read_magic(stream)
        np.lib.format.read_array_header_1_0(stream)
        decoded = np.memmap(path, np.uint8, "r", stream.tell(), shape)
    order = np.flatnonzero(kept)
    shorter = path.with_name(f"{path.name}.kept")
    with shorter.open("wb") as stream:
        _write_header(stream, (len(order), *shape[1:]))
        for start in range(0, len(order), BLOCK):
            stream.write(decoded[order[start : start + BLOCK]].tobytes())
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


def _target_facts(manifest: pd.DataFrame) -> dict[str, Any]:
    """Return mean and standard deviation of the train split, and the range of all."""
    targets = manifest["target"].to_numpy()
    train = targets[(manifest["split"] == "train").to_numpy()]
    return {
        "train_mean": float(train.mean()) if len(train) else None,
        "train_sd": float(train.std()) if len(train) else None,
        "min": float(targets.min()),
        "max": float(targets.max()),
    }


def _histogram(manifest: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Count samples by target in whole units, by split and sex: it shows a split that lacks ages."""
    names = (manifest["split"] + " " + manifest["sex"]).str.rstrip()
    targets = manifest["target"].round().astype(int)
    histogram = {}
    for target, inner in names.groupby(targets):
        histogram[str(target)] = {str(name): int(n) for name, n in inner.value_counts().sort_index().items()}
    return histogram


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


def _grouped(unused: Sequence[Unused]) -> list[dict[str, Any]]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for entry in unused:
        by_reason[entry.reason].append(entry.path)
    return [
        {"reason": reason, "count": len(paths), "examples": sorted(paths)[:MAX_NAMED]}
        for reason, paths in sorted(by_reason.items())
    ]


def _report(prepared: PreparedSet) -> None:
    """Report what was prepared, what was left out and why, and what looks odd."""
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


def _bad_images_message(dataset: ImageDataset, image_size: int, skipped: list[Unused], num_items: int) -> str:
    named = "".join(f"\n  {entry.reason}" for entry in skipped[:MAX_NAMED])
    more = f"\n  ... and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
    return (
        f"dataset {dataset.name}: {len(skipped)} of {num_items} images cannot be used:{named}{more}\n"
        f"Download them again, or leave them out with dataset.on_bad_image=skip (recorded in every run). "
        f"Then run again: {dataset.command(image_size)}"
    )


def _file_sizes(root: Path, items: list[Item]) -> dict[str, int]:
    """Return the size of every file that holds items; 0 if it cannot be read, and decoding will name the reason."""
    sizes: dict[str, int] = {}
    for file in {file_of(item.path) for item in items}:
        try:
            sizes[file] = (root / file).stat().st_size
        except OSError:
            sizes[file] = 0
    return sizes


def _listing(items: list[Item], sizes: dict[str, int]) -> str:
    """Hash what decides the content without decoding: keys, labels and file sizes."""
    rows = [
        [item.key, item.path, sizes[file_of(item.path)], item.target, item.group, item.sex, item.official]
        for item in items
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
