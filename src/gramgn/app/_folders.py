"""Names of run and sweep folders, as OmegaConf resolvers that ``conf/hydra/default.yaml`` uses."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import OmegaConf

from gramgn.app._repository import absolute, repository

SWEEP_VARIABLE = "GRAMGN_SWEEP_DIR"
COMMON_VARIABLE = "GRAMGN_SWEEP_OVERRIDES"
LONGEST_NAME = 60


def register_resolvers() -> None:
    """Make ``${gramgn.run_dir:}``, ``${gramgn.sweep_dir:}`` and ``${gramgn.job_dir:}`` known to OmegaConf."""
    OmegaConf.register_new_resolver("gramgn.run_dir", run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("gramgn.sweep_dir", sweep_dir, replace=True)
    OmegaConf.register_new_resolver("gramgn.job_dir", job_dir, replace=True)


def run_dir(resume: str | None) -> str:
    """Return a new run's folder ``outputs/runs/<UTC time>-<6 hex>``.

    A resumed run has its folder already, so there Hydra is pointed at the repository, where it writes nothing.
    """
    if resume is not None:
        return str(repository())
    return str(
        repository() / "outputs" / "runs" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    )


def sweep_dir(name: str | None, overrides: Sequence[str]) -> str:
    """Return a sweep's folder, the same for the same command so that it finds itself again.

    Each job composes its own configuration and so asks again with its own overrides; the first answer of the
    process is kept in an environment variable, which processes started for the jobs inherit.
    """
    if SWEEP_VARIABLE not in os.environ:
        os.environ[COMMON_VARIABLE] = "\n".join(overrides)
        leaf = safe_name(name) if name else "adhoc-" + _hash(sorted(overrides))
        os.environ[SWEEP_VARIABLE] = str(absolute("outputs/sweeps") / leaf)
    return os.environ[SWEEP_VARIABLE]


def job_dir(overrides: Sequence[str]) -> str:
    """Return a job's folder name: at most 60 safe characters of what it varies, and a hash of it all (H32)."""
    common = os.environ.get(COMMON_VARIABLE, "").split("\n")
    told = [override for override in overrides if override not in common]
    return f"{safe_name(','.join(told)) or 'defaults'}-{_hash(overrides)}"


def safe_name(text: str) -> str:
    """Return ``text`` with everything but letters, digits and ``._=,-`` replaced, at most 60 characters long."""
    return re.sub(r"[^A-Za-z0-9._=,-]+", "_", text).strip("._-")[:LONGEST_NAME]


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def forget_sweep() -> None:
    """Take away a sweep's folder that holds no job, only Hydra's copy of the command, and forget its name."""
    os.environ.pop(COMMON_VARIABLE, None)
    folder = os.environ.pop(SWEEP_VARIABLE, None)
    if folder is None or not Path(folder).is_dir():
        return
    if [path.name for path in Path(folder).iterdir()] == ["multirun.yaml"]:
        (Path(folder) / "multirun.yaml").unlink()
        Path(folder).rmdir()
