"""Names of run and sweep folders, as OmegaConf resolvers that `conf/hydra/default.yaml` uses."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gramgn.app.paths import absolute, repository, shown
from gramgn.errors import ConfigError
from gramgn.records import identifying, override_key, short_hash
from gramgn.world import world

LONGEST_NAME = 60
SWEEPS = "outputs/sweeps"


def run_dir(resume: str | None) -> str:
    """Return a new run's folder `outputs/runs/<UTC time>-<6 hex>`.

    A resumed run has its folder already, and rank 0 names that of all ranks, so there Hydra is pointed at the
    repository, where it writes nothing.
    """
    mine = world()
    if resume is not None or (mine is not None and mine.rank > 0):
        return str(repository())
    return str(
        repository() / "outputs" / "runs" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    )


def sweep_dir(name: str | None, sweep: str | None, overrides: Sequence[str]) -> str:
    """Return a sweep's folder; the same command gets the same folder, so that it completes the sweep.

    Args:
        name: The value of `name=`, which names the folder if it is given.
        sweep: The file in `conf/sweep/` that was chosen.
        overrides: The whole command line.
    """
    if name:
        leaf = safe_name(name)
    else:
        others = [each for each in identifying(overrides) if override_key(each) != "sweep"]
        begins = safe_name(sweep) if sweep else "adhoc"
        leaf = begins if sweep and not others else f"{begins}-{short_hash(identifying(overrides))}"
    return str(absolute(SWEEPS) / leaf)


def job_name(overrides: Sequence[str], common: Collection[str], existing: Mapping[str, str]) -> str:
    """Return the folder name of a sweep's job: at most 60 safe characters of what it varies, and a hash.

    The hash alone identifies the job: its folder is found again when the sweep varies more, or less.

    Args:
        overrides: The job's command line.
        common: The overrides that all jobs of the sweep have.
        existing: Names of the folders in the sweep's folder, by the hash that they end with.
    """
    own = identifying(overrides)
    digest = short_hash(own)
    named = safe_name("_".join(each.replace("=", "-") for each in own if each not in common))
    return existing.get(digest) or f"{named or 'defaults'}-{digest}"


def safe_name(text: object) -> str:
    """Return `text` with everything but letters, digits and `._-` replaced, at most 60 characters long.

    Such a name needs no quotes on a command line.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(text)).strip("._-")[:LONGEST_NAME]


def check_place(folder: Path, name: Any) -> None:
    """Check that a sweep has its own folder.

    Args:
        folder: The sweep's folder.
        name: The value of `name=`, None if it was not given.

    Raises:
        ConfigError: The name cannot be a folder's name, or the folder is the one that holds all sweeps.
    """
    taken = absolute(SWEEPS)
    safe = safe_name(name) if isinstance(name, str) else name
    if safe != name and folder == taken / safe:
        hint = f", e.g. name={safe}" if safe else ""
        raise ConfigError(
            f"name={name!r} cannot be a sweep's folder: use at most 60 of the characters a-z, A-Z, 0-9 and ._- "
            f"with none of ._- at its ends{hint}"
        )
    if folder == taken:
        raise ConfigError(f"{shown(folder)} holds all sweeps and cannot be one: give name=<its name>")
