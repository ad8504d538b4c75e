"""The base of all image data sets: options, the order of work, and what a layout has to say about itself."""

from __future__ import annotations

import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gramgn.data import _check
from gramgn.data._decode import RESIZE_MODES, Decoder, FileDecoder
from gramgn.data._plan import Plan
from gramgn.data._prepare import prepare_set
from gramgn.data._prepared import open_prepared, prepared_exists
from gramgn.data._scan import describe_folder, find_marker
from gramgn.data._types import Index, RegressionData
from gramgn.errors import ConfigError, DataError, nearest
from gramgn.progress import say

FORMAT = 1
BAD_IMAGE_POLICIES = ("error", "skip")
MIN_SIZE, MAX_SIZE = 4, 2048


class ImageDataset(ABC):
    """Images in a raw folder, one real target each, prepared once into one uint8 array.

    A subclass knows one on-disk layout: where things are (`index`), and what to tell somebody who has no data
    yet (`layout`, `source`). Everything else, from decoding to splits, is shared.

    Args:
        root: Folder of the raw data.
        name: Name used in folders, records and figures.
        prepared_root: Folder in which prepared sets are kept.
        channels: Channels that the network sees, 1 or 3. Stored are the fewest that hold the data.
        resize: ``"stretch"`` ignores the aspect ratio, ``"pad"`` keeps it with black bars, ``"crop"`` cuts
            the central square.
        split_seed: Seed of the split rule.
        on_bad_image: ``"error"`` refuses to finish when a file cannot be decoded, ``"skip"`` leaves it out
            and records it.
        limit: Use this many samples only, chosen by hash; all if None.
        workers: Processes used by prepare; all cores if None.

    Raises:
        ConfigError: An option or a value that is not known.
    """

    unit: ClassVar[str]
    """Unit of the targets."""
    layout: ClassVar[str]
    """The layout expected under ``root``, for messages."""
    source: ClassVar[str]
    """Where to get the data and on which terms, for messages."""
    stand_in: ClassVar[str] = "rsna_synthetic"
    """Data set that can be used meanwhile, for messages."""
    natural_channels: ClassVar[int] = 3
    """Channels that the originals have."""

    def __init__(
        self,
        root: str | Path,
        *,
        name: str,
        prepared_root: str | Path = "data/prepared",
        channels: int = 3,
        resize: str = "stretch",
        split_seed: int = 0,
        on_bad_image: str = "error",
        limit: int | None = None,
        workers: int | None = None,
        **unknown: object,
    ) -> None:
        for key in unknown:
            allowed = self.option_names()
            raise ConfigError(
                f"dataset {name}: unknown option '{key}'{nearest(key, allowed)}. "
                f"Options are: {', '.join(allowed)}"
            )
        self.root = _check.folder_path("root", root)
        self.prepared_root = _check.folder_path("prepared_root", prepared_root)
        self.name = _check.name(name)
        self.channels = _check.choice("channels", channels, (1, 3))
        self.resize = _check.choice("resize", resize, RESIZE_MODES)
        self.split_seed = _check.integer("split_seed", split_seed)
        self.on_bad_image = _check.choice("on_bad_image", on_bad_image, BAD_IMAGE_POLICIES)
        self.limit = None if limit is None else _check.integer("limit", limit, minimum=1)
        self.workers = None if workers is None else _check.integer("workers", workers, minimum=1)

    @classmethod
    def option_names(cls) -> list[str]:
        """List the keyword options of this class, its bases' included."""
        names = {
            parameter.name
            for base in cls.__mro__
            if "__init__" in vars(base) and base is not object
            for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name != "self"
        }
        return sorted(names)

    # What a layout provides.

    @abstractmethod
    def index(self) -> Index:
        """Find all samples under ``root``; raise DataError where the folder does not have the layout."""

    @abstractmethod
    def has_raw(self) -> bool:
        """Say within a fraction of a second whether ``root`` seems to hold the layout."""

    def settings(self) -> dict[str, Any]:
        """Return the options of the layout that decide which samples are used and what they are."""
        return {}

    def ensure_raw(self) -> None:  # noqa: B027 - most layouts have nothing to make
        """Make the raw data if the data set can (stand-ins do); called before indexing."""

    def check_raw(self) -> None:
        """Raise DataError unless raw data is there; stand-ins, which can make it, do nothing."""
        if not self.has_raw():
            raise DataError(self.missing_message())

    def size_for(self, image_size: int) -> int:
        """Return the side in pixels that is prepared when ``image_size`` is asked for."""
        return image_size

    def decoder(self, size: int) -> Decoder:
        """Return what turns an item into pixels ``[C, size, size]``; picklable, it is sent to the workers."""
        return FileDecoder(self.root, size, self.stored_channels, self.resize)

    # What all layouts share.

    @property
    def kind(self) -> str:
        """``"synthetic"`` where a stand-in's marker lies at, above or below ``root``, else ``"real"``."""
        return "synthetic" if find_marker(self.root) else "real"

    @property
    def stored_channels(self) -> int:
        """Channels of the prepared array: grey originals are stored once and repeated on the device."""
        return min(self.natural_channels, self.channels)

    def prepared_folder(self, image_size: int) -> Path:
        """Return where the prepared set of this size lies or will lie.

        The name ends in 8 hex digits over everything that decides the content, the raw folder included.
        """
        size = self._checked_size(image_size)
        decides = {
            "format": FORMAT,
            "layout": type(self).__name__,
            "settings": self.settings(),
            "root": str(self.root.resolve()),
            "size": size,
            # Not `stored_channels`: the name may not depend on the raw files, which may be gone by now.
            "channels": min(self.natural_channels, self.channels),
            "resize": self.resize,
            "split_seed": self.split_seed,
        }
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        return self.prepared_root / f"{self.name}-{size}-{digest[:8]}"

    def command(self, image_size: int) -> str:
        """Return the command line that prepares this data set."""
        options = {"dataset.root": str(self.root), "image_size": str(image_size)}
        return f"python scripts/prepare_data.py dataset={self.name} " + " ".join(
            f"'{key}={value}'" if " " in value else f"{key}={value}" for key, value in options.items()
        )

    def missing_message(self) -> str:
        """Say that there is no raw data: what was searched, what was found, and what to do next."""
        return (
            f"dataset {self.name}: no usable raw data\n"
            f"  searched: {self.root}\n"
            f"  found there: {describe_folder(self.root)}\n"
            f"  expected: {self.layout}\n"
            f"  get it: {self.source}\n"
            f"  then run: python scripts/prepare_data.py dataset={self.name} dataset.root=<folder>\n"
            f"  meanwhile: dataset={self.stand_in} is drawn by this project and needs no download"
        )

    def check(self, image_size: int) -> None:
        """Raise DataError unless the data set is prepared or can be; takes well under a second."""
        if not prepared_exists(self.prepared_folder(image_size)):
            self.check_raw()

    def prepare(self, image_size: int) -> Path:
        """Decode every image once and store the set; return its folder.

        A whole set is left as it is if its raw files are the same or gone; an interrupted one is continued; one
        whose raw files have changed, or which is damaged, is made anew.

        Args:
            image_size: Side of the prepared images in pixels.

        Raises:
            DataError: No raw data, files that cannot be decoded (``on_bad_image="error"``), or a full disk.
        """
        if prepared_exists(self.prepared_folder(image_size)) and not self.has_raw():
            folder = open_prepared(self.prepared_folder(image_size), rebuild=self.command(image_size)).folder
            say(f"already prepared, and the raw files are gone: {folder}")
            return folder
        self.ensure_raw()
        self.check_raw()
        size = self.size_for(self._checked_size(image_size))
        index = self.index()
        if not index.items:
            raise DataError(self.missing_message())
        index = replace(index, items=_check.items(self.name, index.items))
        return prepare_set(self._plan(image_size, size), index, self.decoder(size))

    def load(self, image_size: int) -> RegressionData:
        """Return the prepared set, preparing it first where needed.

        Args:
            image_size: Side of the images in pixels.

        Raises:
            DataError: As `prepare`, or a prepared set that is damaged.
        """
        folder = self.prepared_folder(image_size)
        if not prepared_exists(folder):
            self.check_raw()
            say(f"dataset {self.name}: not prepared yet at this size, preparing it now in {folder}")
            self.prepare(image_size)
        prepared = open_prepared(folder, rebuild=self.command(image_size))
        if prepared.num_skipped and self.on_bad_image == "error":
            raise DataError(
                f"{folder} was prepared without {prepared.num_skipped} files that could not be decoded "
                f"(listed in its unused.csv). Accept that with dataset.on_bad_image=skip, or mend the files "
                f"and run: {self.command(image_size)}"
            )
        keep = self._limited(prepared.keys)
        images = prepared.images if keep is None else prepared.images[keep]
        rows = slice(None) if keep is None else keep
        return RegressionData(
            name=self.name,
            kind=prepared.kind,
            unit=self.unit,
            images=images,
            targets=prepared.targets[rows],
            split=prepared.split[rows],
            keys=prepared.keys[rows],
            channels=self.channels,
            manifest_sha256=prepared.manifest_sha256,
            summary={**prepared.summary, "limit": self.limit, "used": len(prepared.keys[rows])},
        )

    def _limited(self, keys: np.ndarray) -> np.ndarray | None:
        """Return the rows kept under ``limit``, ascending; None where all are."""
        if self.limit is None or self.limit >= len(keys):
            return None
        ranks = [hashlib.sha256(f"limit:{self.split_seed}:{key}".encode()).hexdigest() for key in keys]
        return np.sort(np.argsort(np.array(ranks), kind="stable")[: self.limit])

    def _plan(self, image_size: int, size: int) -> Plan:
        return Plan(
            folder=self.prepared_folder(image_size),
            root=self.root,
            name=self.name,
            kind=self.kind,
            unit=self.unit,
            size=size,
            channels=self.stored_channels,
            resize=self.resize,
            split_seed=self.split_seed,
            on_bad_image=self.on_bad_image,
            workers=self.workers,
            settings=self.settings(),
            command=self.command(image_size),
        )

    def _checked_size(self, image_size: int) -> int:
        return self.size_for(_check.integer("image_size", image_size, minimum=MIN_SIZE, maximum=MAX_SIZE))
