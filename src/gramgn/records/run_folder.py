"""The folder of one run, with run.json and metrics.csv."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.locks import is_locked, locked
from gramgn.records.files import read_regular, write_atomic
from gramgn.records.metrics import Row, columns_for, format_row, parse_metrics
from gramgn.records.schema import FORMAT, STATES, check_record

LOG_FILE = "log.txt"
RESERVE_BYTES = 64 * 1024


class RunFolder:
    """One run on disk; see `create` and `open`.

    Attributes:
        path: The folder, absolute.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, allowed: Collection[str] = ()) -> RunFolder:
        """Create a run folder; if several processes ask for the same one, exactly one gets it.

        Args:
            path: The folder, missing or empty.
            allowed: Names of entries that may already exist.

        Raises:
            InputError: The folder is not empty, another process has just taken it, or it cannot be created.
        """
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            found = sorted(entry.name for entry in folder.path.iterdir() if entry.name not in allowed)
            if not found:
                # The exclusive creation, not the listing above, decides between two starts at once.
                os.close(os.open(folder._lock_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return folder
        except FileExistsError:
            found = [folder._lock_file.name]
        except OSError as error:
            raise InputError(
                f"cannot create the run folder {folder.path}: {error.strerror or error}. "
                "Choose a folder that can be written."
            ) from error
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise InputError(
            f"{folder.path} is not empty (it holds {some}). "
            f"A new run needs its own folder; to continue the run in it, use resume={folder.path}"
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open the folder of a run that exists.

        Raises:
            InputError: There is no such folder, or it holds no `run.json`.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise InputError(
                f"there is no run folder {folder.path}; runs lie in outputs/runs and outputs/sweeps"
            )
        if not folder.run_json.is_file():
            found = ", ".join(sorted(entry.name for entry in folder.path.iterdir())[:5]) or "nothing"
            raise InputError(f"{folder.path} is not a run folder: it has no run.json (it holds {found}).")
        return folder

    @property
    def metrics_csv(self) -> Path:
        """One row per epoch, see `METRIC_COLUMNS`."""
        return self.path / "metrics.csv"

    @property
    def run_json(self) -> Path:
        """State, configuration and provenance of the run."""
        return self.path / "run.json"

    @property
    def checkpoint_dir(self) -> Path:
        """Where the training loop keeps its checkpoints."""
        return self.path / "checkpoints"

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def _reserve(self) -> Path:
        return self.path / ".reserve"

    def reserve(self) -> None:
        """Take space on the disk for the last record, so that a disk that is full is recorded too."""
        # Random, so that no file system compresses it away.
        write_atomic(self._reserve, secrets.token_bytes(RESERVE_BYTES))

    def release(self) -> None:
        """Give that space back."""
        self._reserve.unlink(missing_ok=True)

    def append_log(self, line: str) -> None:
        """Append a line to the run's log; on a full disk it is lost, and the records will report that."""
        with suppress(OSError), (self.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replace `run.json` atomically.

        NaN and infinities, which JSON lacks, are written as the strings `"nan"`, `"inf"` and `"-inf"`.

        Args:
            run: Plain JSON types, with a `state` out of `STATES`; `format` is added.

        Raises:
            ValueError: The state is not one of `STATES`.
            InputError: The disk is full or the folder cannot be written.
        """
        if run.get("state") not in STATES:
            raise ValueError(f"state {run.get('state')!r} is not one of {', '.join(STATES)}")
        content = json.dumps(finite({"format": FORMAT, **run}), indent=2, allow_nan=False)
        write_atomic(self.run_json, content + "\n")

    def update_run(self, **changes: Any) -> dict[str, Any]:
        """Replace some top-level entries of `run.json`, e.g. `state="done"`, and return the new content.

        Raises:
            InputError: `run.json` cannot be read or written.
        """
        run = {**self.read_run(), **changes}
        self.write_run(run)
        return run

    def read_run(self, *needed: str) -> dict[str, Any]:
        """Return the content of run.json.

        Args:
            *needed: Dotted names of entries that must not be missing, e.g. `"config.trainer"`.

        Raises:
            InputError: The file is missing, damaged, or of a format that this version does not know.
        """
        try:
            run = json.loads(read_regular(self.run_json))
        except OSError as error:
            raise InputError(f"cannot read {self.run_json}: {error.strerror or error}") from error
        except ValueError as error:
            raise InputError(f"{self.run_json} is damaged: {error}") from error
        check_record(run, str(self.run_json), needed)
        found: dict[str, Any] = run
        return found

    def append_metrics(self, row: Mapping[str, int | float | None]) -> None:
        """Add one epoch to metrics.csv, atomically; a missing value becomes an empty cell.

        Raises:
            ValueError: A column is unknown or `epoch` is missing.
            InputError: The file cannot be written, or has the columns of another version.
        """
        text = self._metrics_text()
        columns = text.partition("\n")[0].split(",") if text else columns_for(row)
        if columns != columns_for({*columns, *row}):
            raise InputError(
                f"{self.metrics_csv} has the columns of another version; finish that run with the version "
                "that began it, or start a new one."
            )
        line = format_row(row, columns)
        write_atomic(self.metrics_csv, (text or ",".join(columns) + "\n") + line)

    def truncate_metrics(self, epoch: int) -> None:
        """Cut metrics.csv back to an epoch (that of the checkpoint, on resume), atomically.

        Raises:
            InputError: The file is damaged or cannot be written.
        """
        rows = [row for row in self.read_metrics() if (row["epoch"] or 0) <= epoch]
        if self.metrics_csv.is_file():
            columns = columns_for(self._metrics_text().partition("\n")[0].split(","))
            lines = [",".join(columns) + "\n", *(format_row(row, columns) for row in rows)]
            write_atomic(self.metrics_csv, "".join(lines))

    def read_metrics(self) -> list[Row]:
        """Return the rows of `metrics.csv` in file order; none if there is no file yet.

        Raises:
            InputError: The file cannot be read, has unknown columns, or is damaged.
        """
        return parse_metrics(self._metrics_text(), str(self.metrics_csv))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Reserve the run for this process while the block runs; if the process is killed, the lock is released.

        Raises:
            InputError: Another process is writing this run.
        """
        busy = f"another process is writing the run {self.path}. Wait until it has ended, or stop it."
        with locked(self._lock_file, busy):
            yield

    def is_busy(self) -> bool:
        """Return whether another process is writing the run."""
        return is_locked(self._lock_file)

    def _metrics_text(self) -> str:
        try:
            return read_regular(self.metrics_csv).decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise InputError(f"cannot read {self.metrics_csv}: {error.strerror or error}") from error


def find_runs(root: str | os.PathLike[str]) -> list[RunFolder]:
    """Return all run folders (those with a `run.json`) at any depth, sorted by path; none if `root` is missing."""
    found: list[RunFolder] = []
    for folder, folders, files in os.walk(root):
        if "run.json" in files:
            found.append(RunFolder(folder))
            folders.clear()
    return sorted(found, key=lambda run: run.path)


def finite(value: Any) -> Any:
    """Return a value with NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
