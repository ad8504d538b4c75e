"""Names of run and sweep folders, as OmegaConf resolvers that ``conf/hydra/default.yaml`` uses."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import OmegaConf

from gramgn.app._repository import absolute, repository
from gramgn.app._resolvers import register_run_resolvers
from gramgn.records import identifying, override_key, short_hash

LONGEST_NAME = 60
_HASH_LENGTH = 8

# Of the sweep that this process runs: what all of its jobs have in common, and its job folders by their hash.
_common: set[str] = set()
_known: dict[str, str] = {}


def register_resolvers() -> None:
    """Make ``${gramgn.run_dir:}`` and the other values of ours known to OmegaConf."""
    OmegaConf.register_new_resolver("gramgn.run_dir", run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("gramgn.sweep_dir", sweep_dir, replace=True)
    OmegaConf.register_new_resolver("gramgn.job_dir", job_dir, replace=True)
    register_run_resolvers()


def run_dir(resume: str | None) -> str:
    """Return a new run's folder ``outputs/runs/<UTC time>-<6 hex>``.

    A resumed run has its folder already, so there Hydra is pointed at the repository, where it writes nothing.
    """
    if resume is not None:
        return str(repository())
    return str(
        repository() / "outputs" / "runs" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    )


def sweep_dir(name: str | None, sweep: str | None, overrides: Sequence[str]) -> str:
    """Return a sweep's folder, the same for the same command so that it finds itself again.

    Args:
        name: ``name=``; it decides if it is given.
        sweep: The file in ``conf/sweep/`` that was chosen.
        overrides: The whole command line.
    """
    if name:
        leaf = safe_name(name)
    else:
        others = [each for each in identifying(overrides) if override_key(each) != "sweep"]
        begins = safe_name(sweep) if sweep else "adhoc"
        leaf = begins if sweep and not others else f"{begins}-{short_hash(identifying(overrides))}"
    return str(absolute("outputs/sweeps") / leaf)


def remember_sweep(folder: Path, common: Sequence[str]) -> None:
    """Take note of the sweep that this process runs, for :func:`job_dir`.

    Args:
        folder: Its folder; jobs that lie there keep their folder's name.
        common: The overrides that all of its jobs have.
    """
    _common.clear()
    _common.update(common)
    _known.clear()
    if folder.is_dir():
        _known.update({path.name[-_HASH_LENGTH:]: path.name for path in folder.iterdir() if path.is_dir()})


def job_dir(overrides: Sequence[str]) -> str:
    """Return a job's folder name: at most 60 safe characters of what it varies, and a hash of it all (H32).

    The hash alone identifies the job: one that exists is found again when the sweep varies more, or less.
    """
    own = identifying(overrides)
    digest = short_hash(own)
    told = [override for override in own if override not in _common]
    return _known.get(digest) or f"{safe_name(','.join(told)) or 'defaults'}-{digest}"


def safe_name(text: object) -> str:
    """Return ``text`` with everything but letters, digits and ``._=,-`` replaced, at most 60 characters long."""
    return re.sub(r"[^A-Za-z0-9._=,-]+", "_", str(text)).strip("._-")[:LONGEST_NAME]
