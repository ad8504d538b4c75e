"""The records of one run while it goes on: run.json, the log, and the W&B mirror."""

from __future__ import annotations

import traceback
from typing import Any

from gramgn.app._plan import OUTPUT_FILE
from gramgn.app._repository import repository, shown
from gramgn.errors import InputError
from gramgn.progress import say
from gramgn.records import Row, RunFolder, path_override, portable
from gramgn.stopping import StopRequested
from gramgn.tracking import TrackingConfig, WandbMirror
from gramgn.training import Clock, Diverged, Reporter, Trainer

LOG_FILE = "log.txt"
# In a new run's folder: the output of its process in a sweep, and what a start left that came to nothing.
MAY_LIE_THERE = (OUTPUT_FILE, LOG_FILE, "wandb")


class Recording:
    """Keeps run.json true, whatever happens, and closes the mirror after the records are on disk.

    Args:
        folder: The run's folder, locked by the caller.
        record: The first content of run.json.
        clock: The run's clock.
    """

    def __init__(self, folder: RunFolder, record: dict[str, Any], clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.reporter = Reporter(self.log, unit="")
        self.trainer: Trainer | None = None
        self._mirror: WandbMirror | None = None
        folder.write_run(record)

    def log(self, line: str) -> None:
        """Append to the run's log file."""
        with (self.folder.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def add(self, **entries: Any) -> dict[str, Any]:
        """Change entries of run.json and return all of it."""
        return self.folder.update_run(**entries)

    def start_mirror(self, tracking: TrackingConfig) -> None:
        """Open the W&B run of this job, the same one again where the run is resumed."""
        record = self.folder.read_run()
        self._mirror = WandbMirror.start(self.folder, record, tracking)
        if self._mirror.mode != "none":
            self.add(wandb={"id": record["id"], "mode": self._mirror.mode})

    def rows(self, rows: list[Row]) -> None:
        """Mirror rows of metrics.csv whose checkpoint is on disk."""
        if self._mirror is not None:
            self._mirror.log_rows(rows)

    def close(self, error: BaseException | None) -> dict[str, Any]:
        """Write the final state and return run.json.

        Args:
            error: What ended the run before its time, or None.
        """
        state, exit_code = outcome(error)
        self.reporter.close()
        entry = None
        if error is not None:
            entry = {"type": type(error).__name__, "message": portable(str(error), repository())}
            is_bug = state == "failed" and not isinstance(error, InputError)
            self.log("".join(traceback.format_exception(error)) if is_bug else f"{state}: {error}")
        entries: dict[str, Any] = {"state": state, "error": entry, "time": self.clock.summary()}
        if self.trainer is not None and self.trainer.position.best.epoch:
            entries["best"] = vars(self.trainer.position.best).copy()
        record = self.add(**entries)
        if self._mirror is not None:
            reason = f"{entry['type']}: {entry['message']}" if entry else None
            self._mirror.finish(exit_code, reason, entries.get("best"))
        why = f"{error}; " if state == "diverged" else ""
        goes_on = (
            f" ({path_override('resume', shown(self.folder.path))} goes on)" if state == "interrupted" else ""
        )
        say(f"{state}: {why}{shown(self.folder.path)}{goes_on}")
        return record


def outcome(error: BaseException | None) -> tuple[str, int]:
    """Return a run's state and exit code for what ended it (DESIGN, exit codes)."""
    match error:
        case None:
            return "done", 0
        case Diverged():
            return "diverged", 3
        case StopRequested():
            return "interrupted", error.exit_code
        case InputError():
            return "failed", 2
    return "failed", 1
