"""The records of one run: the content of run.json, the log, and the W&B mirror."""

from __future__ import annotations

import secrets
import traceback
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from gramgn.app.paths import repository, shown
from gramgn.app.plan import OUTPUT_FILE, Job, split_paths
from gramgn.damping import alpha_from_sum, alpha_to_sum
from gramgn.errors import InputError, JobFailedError
from gramgn.progress import say
from gramgn.records import (
    LOG_FILE,
    RunFolder,
    git_state,
    idle_epochs_note,
    path_override,
    portable,
    processor_name,
    start_record,
)
from gramgn.scheduler import job_id
from gramgn.stopping import StopRequested
from gramgn.tracking import TrackingConfig, WandbMirror
from gramgn.training import Clock, Diverged, Precision, Reporter, Trainer

# What may lie in a new run's folder: its process's output in a sweep, and leftovers of a start that was rejected.
MAY_LIE_THERE = (OUTPUT_FILE, LOG_FILE, "wandb")


class Recording:
    """Keeps run.json true, whatever happens, and closes the W&B mirror after the records are on disk.

    Space for the last record is reserved while the run works, so that a disk that is full is recorded too.

    Args:
        folder: The run's folder, locked by the caller.
        record: The first content of run.json.
        clock: The run's clock.
    """

    def __init__(self, folder: RunFolder, record: dict[str, Any], clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.reporter = Reporter(folder.append_log, unit="")
        self.trainer: Trainer | None = None
        self.mirror = WandbMirror(folder, record, None, TrackingConfig("none"))
        with clock.part("startup"):
            folder.reserve()
            folder.write_run(record)

    def start_mirror(self, tracking: TrackingConfig) -> None:
        """Open the W&B run of this job, or the same one again when it is resumed."""
        record = self.folder.read_run()
        self.mirror = WandbMirror.start(self.folder, record, tracking)
        if self.mirror.mode != "none":
            self.folder.update_run(wandb={"id": self.mirror.run_id, "mode": self.mirror.mode})

    def withdraw(self, stored: dict[str, Any]) -> None:
        """Leave run.json as it was before this start."""
        self.folder.release()
        self.folder.write_run(stored)

    def close(self, error: BaseException | None) -> dict[str, Any]:
        """Write the final state and return run.json.

        Args:
            error: What ended the run early; None if it is done.
        """
        state, exit_code = outcome(error)
        self.reporter.close()
        entry = None
        self.folder.release()
        if error is not None:
            entry = {"type": type(error).__name__, "message": portable(str(error), repository())}
            is_bug = state == "failed" and not isinstance(error, InputError | JobFailedError)
            self.folder.append_log(
                "".join(traceback.format_exception(error)) if is_bug else f"{state}: {error}"
            )
            if details := getattr(error, "details", ""):
                self.folder.append_log(details)
        entries: dict[str, Any] = {"state": state, "error": entry, "time": self.clock.summary()}
        if self.trainer is not None and self.trainer.position.best.epoch:
            entries["best"] = vars(self.trainer.position.best).copy()
        if self.trainer is not None and (choices := getattr(self.trainer.optimizer, "choices", None)):
            entries["engine"] = choices
        record = self.folder.update_run(**entries)
        reason = f"{entry['type']}: {entry['message']}" if entry else None
        self.mirror.finish(exit_code, reason, entries.get("best"))
        note = idle_epochs_note(self.folder.read_metrics()) if state == "done" else ""
        why = f"{error}; " if state == "diverged" else ""
        resume = path_override("resume", shown(self.folder.path))
        how = f" (resume it with {resume})" if state == "interrupted" else ""
        say(f"{state}: {why}{shown(self.folder.path)}{how}")
        if note:
            self.reporter.say(f"note: {note}")
        return record


def outcome(error: BaseException | None) -> tuple[str, int]:
    """Return the state and the exit code of a run that ended with `error`, or without one."""
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


def first_record(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    precision: Precision,
    num_ranks: int = 1,
) -> dict[str, Any]:
    """Return run.json as it is written before any work, so that even a killed run says what it was."""
    config, _ = split_paths(job.config)
    start = start_record() | {"git": job.git or git_state(repository()), "job": job_id()}
    stored = job.stored or {}
    return {
        "id": stored.get("id") or secrets.token_hex(8),
        "state": "running",
        "error": None,
        "name": job.config["name"],
        "group": job.group,
        "choices": job.choices,
        "dataset": stored.get("dataset") or {"name": job.config["dataset"].get("name")},
        "model": {
            "name": job.choices.get("model", type(model).__name__),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "optimizer": optimizer_record(job, optimizer, None),
        "config": config,
        "overrides": portable(job.overrides, repository()),
        "seed": job.config["seed"],
        "init_from": config["init_from"],
        "scaling": stored.get("scaling"),
        "git": start["git"],
        "versions": start["versions"],
        "device": {
            "kind": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        },
        "threads": torch.get_num_threads(),
        "ranks": num_ranks,
        "precision": asdict(precision),
        "starts": [*stored.get("starts", []), start],
        "resume_count": len(stored.get("starts", [])),
        "time": stored.get("time"),
        "wandb": stored.get("wandb"),
        "best": stored.get("best"),
    }


def dataset_record(data: Any) -> dict[str, Any]:
    """Return the record of a data set; its size is that of the images, whatever was asked for.

    The sizes of the splits are counted here if the data set's summary does not have them.
    """
    splits, numbers = np.unique(data.split, return_counts=True)
    counts = dict(zip(splits.tolist(), numbers.tolist(), strict=True))
    return {
        "name": data.name,
        "kind": data.kind,
        "unit": data.unit,
        "image_size": int(data.images.shape[-1]) if data.images.ndim == 4 else None,
        "manifest_sha256": data.manifest_sha256,
        "summary": portable({"counts": counts, **data.summary}, repository()),
    }


def optimizer_record(job: Job, optimizer: torch.optim.Optimizer, batch_size: int | None) -> dict[str, Any]:
    """Return the optimizer's name and, once b is known, GGN's alpha in both conventions for a whole batch.

    In the trace convention alpha has no fixed value in either: metrics.csv has it for every epoch.
    """
    record: dict[str, Any] = {"name": job.choices.get("optimizer", type(optimizer).__name__)}
    settings = optimizer.param_groups[0]
    if "damping_convention" in settings and batch_size is not None:
        convention = settings["damping_convention"]
        record |= {"lam": float(settings["lam"]), "damping_convention": convention}
        if convention != "trace":
            alpha_sum = alpha_to_sum(float(settings["alpha"]), convention, num_samples=batch_size)
            alpha_mean = alpha_from_sum(alpha_sum, "mean", num_samples=batch_size)
            record |= {"alpha_sum": alpha_sum, "alpha_mean": alpha_mean}
    return record
