"""The content of run.json: what was run, with what, on what, and how it went."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from gramgn.app._plan import Job, split_paths
from gramgn.app._repository import repository
from gramgn.damping import alpha_from_sum, alpha_to_sum
from gramgn.records import git_state, portable, processor_name, start_record
from gramgn.training import Precision


def first_record(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, precision: Precision
) -> dict[str, Any]:
    """Return run.json as it is written before any work, so that even a killed run says what it was."""
    config, _ = split_paths(job.config)
    start = start_record() | {"git": job.git or git_state(repository())}
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
        "device": {"kind": device.type, "name": _device_name(device)},
        "threads": torch.get_num_threads(),
        "precision": asdict(precision),
        "starts": [*stored.get("starts", []), start],
        "resume_count": len(stored.get("starts", [])),
        "time": stored.get("time"),
        "wandb": stored.get("wandb"),
        "best": stored.get("best"),
    }


def dataset_record(data: Any) -> dict[str, Any]:
    """Return what is recorded of a data set; the size is that of the images, whatever was asked for."""
    return {
        "name": data.name,
        "kind": data.kind,
        "unit": data.unit,
        "image_size": int(data.images.shape[-1]) if data.images.ndim == 4 else None,
        "manifest_sha256": data.manifest_sha256,
        "summary": portable(data.summary, repository()),
    }


def optimizer_record(job: Job, optimizer: torch.optim.Optimizer, batch_size: int | None) -> dict[str, Any]:
    """Return the optimizer's name and, once b is known, GGN's alpha in both conventions for a whole batch.

    Relative to the trace of G it has no fixed value in either: metrics.csv tells it for every epoch.
    """
    record: dict[str, Any] = {"name": job.choices.get("optimizer", type(optimizer).__name__)}
    settings = optimizer.param_groups[0]
    if "lam" in settings and batch_size is not None:
        convention = settings.get("damping_convention", "sum")
        record |= {"lam": float(settings["lam"]), "damping_convention": convention}
        if convention != "trace":
            alpha_sum = alpha_to_sum(float(settings["alpha"]), convention, num_samples=batch_size)
            alpha_mean = alpha_from_sum(alpha_sum, "mean", num_samples=batch_size)
            record |= {"alpha_sum": alpha_sum, "alpha_mean": alpha_mean}
    return record


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
