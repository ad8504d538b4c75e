"""The base of all image data sets: options, the order of work, and what a layout provides."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gramgn.data.decode import DEEP_MAX, RESIZE_MODES, Decode, Decoder
from gramgn.data.prepare import prepare_set
from gramgn.data.prepared import open_prepared
from gramgn.data.raw_state import RawState, changes, is_foreign, raw_state, recorded_state
from gramgn.data.scan import describe_folder, is_synthetic, walk
from gramgn.data.types import Index, RegressionData
from gramgn.errors import ConfigError, DataError, checked_choice, checked_whole, nearest
from gramgn.progress import say

FORMAT = 1
BAD_IMAGE_POLICIES = ("error", "skip")
MIN_SIZE, MAX_SIZE = 4, 2048


class ImageDataset(ABC):
    """Images in a raw folder with one real target per image, prepared once into one uint8 array.

    A subclass knows one on-disk layout: where the images are (`index`), and what to show somebody who has no data
    yet (`layout`, `source`). Everything else, from decoding to splits, is shared.

    Args:
        root: Folder of the raw data.
        name: Name used in folders, records and figures.
        prepared_root: Folder of the prepared sets; `data/prepared` by default.
        channels: Channels that the network sees, 1 or 3 (the default). As few as hold the data are stored.
        resize: `"stretch"` (the default) ignores the aspect ratio, `"pad"` keeps it with black bars, `"crop"` cuts
            the central square.
        split_seed: Seed of the split rule; 0 by default.
        on_bad_image: `"error"` (the default) fails when a file cannot be decoded, `"skip"` leaves it out
            and records it.
        target_range: Smallest and largest target that is used, in `unit`; the class's `plausible` range if None.
        grey_range: Values of 16-bit grey images that become black and white; `[0, 65535]` if None. `[0, 4095]` is the
            range of 12 bits.
        limit: Use at most this number of samples, chosen by hash; all if None.
        workers: Number of processes that prepare; all cores if None.

    Raises:
        ConfigError: An unknown option, or a value that is not allowed.
    """

    unit: ClassVar[str]
    """Unit of the targets."""
    layout: ClassVar[str]
    """The layout expected under `root`, for messages."""
    source: ClassVar[str]
    """Where to get the data and on which terms, for messages."""
    substitute: ClassVar[str] = "rsna_synthetic"
    """Synthetic data set that can be used meanwhile, for messages."""
    natural_channels: ClassVar[int] = 3
    """Number of channels of the originals."""
    plausible: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """Smallest and largest target that can be right, in `unit`."""
    augmentations: ClassVar[tuple[str, ...]] = ()
    """Changes of an image (keys of `conf/augment`: `flip`, `crop`, `rotate`) under which its target stays right."""

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
        target_range: Sequence[float] | None = None,
        grey_range: Sequence[int] | None = None,
        limit: int | None = None,
        workers: int | None = None,
        **unknown: object,
    ) -> None:
        for key in unknown:
            allowed = sorted({"root", *self._defaults()})
            raise ConfigError(
                f"dataset {name}: unknown option '{key}'{nearest(key, allowed)}. "
                f"Options are: {', '.join(allowed)}"
            )
        self.root = _absolute("dataset.root", root)
        self.prepared_root = _absolute("dataset.prepared_root", prepared_root)
        self.name = checked_name(name)
        self.channels = checked_choice("dataset.channels", channels, (1, 3))
        self.resize = checked_choice("dataset.resize", resize, RESIZE_MODES)
        self.split_seed = checked_whole("dataset.split_seed", split_seed)
        self.on_bad_image = checked_choice("dataset.on_bad_image", on_bad_image, BAD_IMAGE_POLICIES)
        self.target_range = _range("dataset.target_range", target_range, whole=False)
        self.grey_range = _range("dataset.grey_range", grey_range, whole=True)
        self.limit = None if limit is None else checked_whole("dataset.limit", limit, minimum=1)
        self.workers = None if workers is None else checked_whole("dataset.workers", workers, minimum=1)

    # A layout provides the following methods.

    @abstractmethod
    def index(self) -> Index:
        """Find all samples under `root`; raise DataError if the folder does not have the layout."""

    @abstractmethod
    def has_raw(self) -> bool:
        """Return within a fraction of a second whether `root` seems to hold the layout."""

    def settings(self) -> dict[str, Any]:
        """Return the options of the layout that decide which samples are used and what they are."""
        return {}

    def raw_files(self) -> Iterator[tuple[str, Path]]:
        """Yield every file that the samples may depend on: its path below `root`, and its path."""
        holds_prepared = self.prepared_root.is_relative_to(self.root)
        for relative, path, ignored in walk(self.root):
            if not ignored and not (holds_prepared and path.is_relative_to(self.prepared_root)):
                yield relative, path

    def ensure_raw(self) -> None:  # noqa: B027 - most layouts have nothing to draw
        """Draw the raw data of a synthetic data set; called before indexing."""

    def check_raw(self) -> None:
        """Raise DataError unless there is raw data; synthetic sets, which draw it, do nothing."""
        if not self.has_raw():
            raise DataError(self.missing_message())

    def size_for(self, image_size: int) -> int:
        """Return the side in pixels that is prepared when `image_size` is asked for."""
        return image_size

    def decoder(self, size: int) -> Decode:
        """Return a picklable function that turns an item into pixels `[C, size, size]`."""
        return Decoder(self.root, size, self.stored_channels, self.resize, self.grey_range)

    # All layouts share the following methods.

    @property
    def kind(self) -> str:
        """`"synthetic"` if the marker of a drawn set lies at, above or below `root`, else `"real"`."""
        return "synthetic" if is_synthetic(self.root) else "real"

    @property
    def stored_channels(self) -> int:
        """Number of channels of the prepared array; grey is stored once and repeated on the device."""
        return min(self.natural_channels, self.channels)

    def prepared_folder(self, image_size: int) -> Path:
        """Return the folder of the prepared set of this size, whether or not it exists.

        Its name ends in 8 hex digits over everything that decides the content, including the raw folder.
        """
        size = self._checked_size(image_size)
        decides = {
            "format": FORMAT,
            "layout": type(self).__name__,
            "settings": self.settings(),
            "root": str(self.root.resolve()),
            "size": size,
            # Not `stored_channels`: the name may not depend on the raw files, which may have been removed.
            "channels": min(self.natural_channels, self.channels),
            "resize": self.resize,
            "split_seed": self.split_seed,
        }
        given = {"target_range": self.target_range, "grey_range": self.grey_range}
        decides |= {name: value for name, value in given.items() if value is not None}
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        return self.prepared_root / f"{self.name}-{size}-{digest[:8]}"

    def command(self, image_size: int) -> str:
        """Return the command line that prepares this data set."""
        return self._command({"dataset.root": self.root}, image_size)

    def _command(self, options: dict[str, object], image_size: int) -> str:
        """Return that command line with `options` and all options that differ from their defaults."""
        changed = {
            f"dataset.{name}": getattr(self, name)
            for name, default in self._defaults().items()
            if name not in ("name", "prepared_root", "limit", "workers")
            and hasattr(self, name)
            and getattr(self, name) != default
        }
        given = {**options, **changed, "image_size": image_size}.items()
        words = [f"'{key}={value}'" if " " in str(value) else f"{key}={value}" for key, value in given]
        is_user_defined = any(is_foreign(base.__module__) for base in type(self).__mro__)
        where = "--config-dir <your conf folder> " if is_user_defined else ""
        return f"python scripts/prepare_data.py {where}dataset={self.name} {' '.join(words)}"

    def _defaults(self) -> dict[str, Any]:
        """Return the options with their defaults."""
        signatures = [inspect.signature(base.__init__) for base in type(self).__mro__[::-1]]  # type: ignore[misc]
        parameters = [parameter for each in signatures for parameter in each.parameters.values()]
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def missing_message(self) -> str:
        """Return the message for missing raw data: the folder, its content, and what to do next."""
        return (
            f"dataset {self.name}: no usable raw data\n"
            f"  searched: {self.root}\n"
            f"  found there: {describe_folder(self.root)}\n"
            f"  expected: {self.layout}\n"
            f"  get it: {self.source}\n"
            f"  then run: python scripts/prepare_data.py dataset={self.name} dataset.root=<folder>\n"
            f"  meanwhile: dataset={self.substitute} is drawn by this project and needs no download"
        )

    def check(self, image_size: int) -> None:
        """Raise DataError unless the data set is prepared or can be prepared; takes well under a second."""
        if not self.prepared_folder(image_size).is_dir():
            self.check_raw()

    def verify(self, image_size: int) -> Path:
        """Hash every byte of the prepared set and return its folder; opening a set compares sizes and times only.

        Raises:
            DataError: The set is not prepared, or differs from what was written.
        """
        folder = self.prepared_folder(image_size)
        if not folder.is_dir():
            raise DataError(f"{folder} does not exist yet. Prepare it with: {self.command(image_size)}")
        return open_prepared(folder, rebuild=self.command(image_size), check=True).folder

    def prepare(self, image_size: int) -> Path:
        """Decode every image once and store the set; return its folder.

        A whole set stays as it is if its raw data is unchanged or removed. A set that is damaged, or whose raw data
        has changed, is rebuilt. An interrupted preparation leaves no set and starts over.

        Args:
            image_size: Side of the prepared images in pixels.

        Raises:
            DataError: No raw data, files that cannot be decoded (`on_bad_image="error"`), or a full disk.
        """
        folder = self.prepared_folder(image_size)
        if folder.is_dir() and self._raw_is_gone(folder, raw_state(self)):
            try:
                open_prepared(folder, rebuild=self.command(image_size))
                return folder
            except DataError as error:  # a synthetic set is drawn again; of any other, the raw data is needed
                say(str(error))
        self.ensure_raw()
        try:
            self.check_raw()
            state = raw_state(self)
            index = self.index()
            if not index.items:
                raise DataError(self.missing_message())
        except DataError as error:
            if not folder.is_dir():
                raise
            raise DataError(
                f"{error}\n  The prepared set {folder} is as it was, but not used: "
                f"{changes(recorded_state(folder), raw_state(self)) or 'its raw data is not usable'}. "
                "Put the raw data back, or leave its folder empty to use what was prepared from it"
            ) from error
        return prepare_set(self, image_size, index, state)

    def load(self, image_size: int) -> RegressionData:
        """Return the prepared set, preparing it first if needed.

        Args:
            image_size: Side of the images in pixels.

        Raises:
            DataError: Any error of `prepare`, or a prepared set that is damaged.
        """
        folder = self.prepared_folder(image_size)
        if not folder.is_dir():
            self.check_raw()
            say(f"dataset {self.name}: not prepared yet at this size, preparing it now in {folder}")
            self.prepare(image_size)
        else:
            now = raw_state(self)
            if changes(recorded_state(folder), now) and not self._raw_is_gone(folder, now):
                self.prepare(image_size)
        prepared = open_prepared(folder, rebuild=self.command(image_size))
        manifest, num_skipped = prepared.manifest, len(prepared.meta["skipped"])
        if num_skipped and self.on_bad_image == "error":
            raise DataError(
                f"{folder} was prepared without {num_skipped} files that could not be decoded "
                f"(listed in its unused.csv). Accept that with dataset.on_bad_image=skip, or mend the files "
                f"and run: {self.command(image_size)}"
            )
        keys = manifest["key"].to_numpy(np.str_)
        limited = self.limit is not None and self.limit < len(keys)
        rows = limited_rows(keys, self.limit, self.split_seed) if limited else slice(None)
        return RegressionData(
            name=self.name,
            kind=prepared.meta["kind"],
            unit=self.unit,
            images=prepared.images[rows] if limited else prepared.images,
            targets=manifest["target"].to_numpy(np.float64)[rows],
            split=manifest["split"].to_numpy("<U5")[rows],
            keys=keys[rows],
            channels=self.channels,
            manifest_sha256=prepared.meta["manifest_sha256"],
            summary={**prepared.summary, "limit": self.limit, "used": len(keys[rows])},
        )

    def _raw_is_gone(self, folder: Path, now: RawState) -> bool:
        """Return, and report, whether nothing usable is left of the raw data of a prepared set, and nothing is new."""
        before = recorded_state(folder)
        gone = (before is None or now.only_lacks(before)) and not (now.files and self.has_raw())
        if gone:
            say(f"note: the raw files in {self.root} are gone; {folder} was prepared from them")
        return gone

    def _checked_size(self, image_size: int) -> int:
        return self.size_for(checked_whole("image_size", image_size, minimum=MIN_SIZE, maximum=MAX_SIZE))


def checked_name(given: str) -> str:
    """Return the name if it is safe as part of a folder's name, else raise ConfigError."""
    if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}", given):
        raise ConfigError(
            f"dataset.name={given!r}: must be 1 to 60 letters, digits, '_', '-' or '.', "
            f"beginning with a letter or digit"
        )
    return given


def limited_rows(keys: np.ndarray, limit: int | None, seed: int) -> np.ndarray:
    """Return, in ascending order, the `limit` rows (all if None) whose keys have the smallest hashes."""
    ranks = [hashlib.sha256(f"limit:{seed}:{key}".encode()).hexdigest() for key in keys]
    return np.sort(np.argsort(np.array(ranks), kind="stable")[:limit])


def _range(option: str, given: Any, *, whole: bool) -> Any:
    """Return two ascending numbers as a tuple, or None; raise ConfigError for anything else."""
    if given is None:
        return None
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    kind = int if whole else int | float
    if (
        len(values) != 2
        or any(isinstance(value, bool) or not isinstance(value, kind) for value in values)
        or not values[0] < values[1]
        or (whole and not 0 <= values[0] < values[1] <= DEEP_MAX)
    ):
        kinds = f"whole numbers from 0 to {DEEP_MAX}" if whole else "numbers"
        raise ConfigError(f"{option}={given}: must be two ascending {kinds}, e.g. {option}=[0,4095]")
    return tuple(values)


def _absolute(option: str, given: str | Path) -> Path:
    """Return an absolute path with `~` resolved; raise ConfigError for anything that is not a path."""
    if not isinstance(given, str | Path) or not str(given).strip():
        raise ConfigError(f"{option}={given!r}: must be a path, e.g. {option}=/data/images")
    return Path(given).expanduser().absolute()
