"""What makes two runs the same: one list of configuration keys with their roles.

It answers three questions, each of which leaves out other keys:

- Is this the same job of a sweep (`differing`)? Incidental keys are left out.
- Do these checkpoints belong to this run (`checkpoint_identity`)? Keys that may change on resume are left out, too.
- Are these two runs the same experiment with different seeds (`settings`, `other_settings`)? Incidental keys, the
  seed, the location of the data (its manifest identifies the images) and labels are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from gramgn.records.columns import RUN_COLUMNS, fits

INCIDENTAL = "incidental"
RESUME = "resume"
SEED = "seed"
LOCATION = "location"
LABEL = "label"

ROLES: Mapping[str, str] = {
    # Where, how verbosely and under which name a run is made: changes no result.
    "tracking": INCIDENTAL,
    "resume": INCIDENTAL,
    "name": INCIDENTAL,
    "on_failure": INCIDENTAL,
    "trainer.device": INCIDENTAL,
    "trainer.threads": INCIDENTAL,
    "dataset.workers": INCIDENTAL,
    "optimizer.engine.kernels": INCIDENTAL,
    "optimizer.engine.memory_budget": INCIDENTAL,
    "optimizer.engine.low_memory": INCIDENTAL,  # of earlier versions
    # May change when a run is resumed, but makes another result.
    "trainer.epochs": RESUME,
    # Repetitions of one experiment.
    "seed": SEED,
    "trainer.deterministic": SEED,
    # Where the data lies; `dataset.manifest_sha256` in run.json says which images they are.
    "dataset.root": LOCATION,
    "dataset.prepared_root": LOCATION,
    # Names a bundle of settings that are recorded themselves.
    "trainer.scale": LABEL,
}
"""Role of each configuration key that does not distinguish every run; a key stands for everything below it."""

ADDED: Mapping[str, Any] = {
    "schedule.shape": "constant",
    "schedule.every": "step",
    "schedule.warmup": 0.0,
    "schedule.alpha": None,
    "schedule.momentum": None,
    "augment.flip": False,
    "augment.crop": 0.0,
    "augment.rotate": 0.0,
    "trainer.average_decay": None,
}
"""Keys that records of earlier versions lack, and their values that mean the same: these identify nothing."""

RESUMABLE = ("trainer.epochs", "trainer.device", "trainer.threads", "tracking")
"""Keys that may be changed when a run is resumed."""

SETTING_COLUMNS: Mapping[str, str] = {
    "depth": "model.depth",
    "lr": "optimizer.lr",
    "lam": "optimizer.lam",
    "alpha": "optimizer.alpha",
    "damping_convention": "optimizer.damping_convention",
    "momentum": "optimizer.momentum",
    "epochs": "trainer.epochs",
    "batch_size": "trainer.batch_size",
    "threads": "threads",
}
"""Settings with a column of their own in the table of runs, and their configuration keys.

`other_settings` is a digest of all the others."""


def role(key: str) -> str | None:
    """Return the role of a dotted configuration key, None for a key that makes a run another one."""
    parts = key.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((ROLES[prefix] for prefix in prefixes if prefix in ROLES), None)


def is_incidental(key: str) -> bool:
    """Return whether a dotted configuration key changes no result."""
    return role(key) == INCIDENTAL


def flat(config: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return a nested configuration as one mapping with dotted keys, without keys of some roles, e.g. `INCIDENTAL`."""
    found: dict[str, Any] = {}

    def add(tree: Mapping[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value:
                add(value, f"{key}.")
            elif not without or role(key) not in without:
                found[key] = value

    add(config, "")
    return found


def with_added(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration in which no key is missing because its version did not have it yet."""
    filled = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for key, value in ADDED.items():
        section, _, name = key.partition(".")
        if isinstance(entries := filled.setdefault(section, {}), dict):
            entries.setdefault(name, value)
    return filled


def _identifying(config: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return `flat` of a configuration without keys that an earlier version lacked and that change nothing."""
    return {
        key: value for key, value in flat(config, *without).items() if key not in ADDED or value != ADDED[key]
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two jobs differ, with both values; an absent one is None."""
    first, second = _identifying(one, INCIDENTAL), _identifying(other, INCIDENTAL)
    # Compared as JSON, so that what was written to run.json and read back equals what was written.
    keys = [key for key in first | second if _text(first, key) != _text(second, key)]
    return {key: (first.get(key), second.get(key)) for key in sorted(keys)}


def checkpoint_identity(record: Mapping[str, Any]) -> str:
    """Return what ties checkpoints to the run of run.json: its id and all of its configuration that must not change."""
    return digest([record["id"], _identifying(record["config"], INCIDENTAL, RESUME)])


def settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that makes a run another experiment, by dotted key; its seed does not.

    On a CPU the number of threads is a setting (`"threads"`), because it changes the measured times. `init_from`
    counts only where the command line gave it: an experiment that names its start finds another path for each seed.
    """
    found = _identifying(record.get("config") or {}, INCIDENTAL, SEED, LOCATION, LABEL)
    is_given = any(override_key(str(word)) == "init_from" for word in record.get("overrides") or ())
    if (record.get("choices") or {}).get("experiment") and not is_given:
        found.pop("init_from", None)
    if (record.get("device") or {}).get("kind") == "cpu":
        found["threads"] = record.get("threads")
    if (ranks := record.get("ranks") or 1) > 1:
        found["ranks"] = ranks
    return found


def other_settings(record: Mapping[str, Any]) -> str:
    """Return twelve digits that are equal for runs that differ only in `SETTING_COLUMNS` and the seed."""
    # A value that its column cannot hold, such as a list of learning rates, counts here instead.
    own = {
        SETTING_COLUMNS[column.name]: column.type for column in RUN_COLUMNS if column.name in SETTING_COLUMNS
    }
    rest = {
        key: _as_number(value)
        for key, value in settings(record).items()
        if key not in own or not fits(value, own[key])
    }
    return digest(rest)[:12]


def override_key(override: str) -> str:
    """Return the key of an override, e.g. `"optimizer.lam"` of `"++optimizer.lam=1"`."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0].replace("/", ".")


def identifying(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that identify a job or a sweep, sorted, each once."""
    return sorted({str(each) for each in overrides if not is_incidental(override_key(str(each)))})


def path_override(key: str, path: object) -> str:
    """Return an override to paste into a shell, quoted where Hydra or the shell would misread the path."""
    text = str(path)
    if re.fullmatch(r"[\w./+@%-]+", text, re.ASCII):
        return f"{key}={text}"
    quoted = "{}='{}'".format(key, text.replace("'", "\\'"))
    return shlex.quote(quoted) if re.search(r"[$`\"!\\]", quoted) else f'"{quoted}"'


def short_hash(parts: Iterable[str]) -> str:
    """Return 8 hexadecimal digits for a list of texts, for the names of folders."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def digest(value: Any) -> str:
    """Return the SHA-256 of anything made of plain JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _text(config: Mapping[str, Any], key: str) -> str | None:
    return json.dumps(config[key], sort_keys=True) if key in config else None


def _as_number(value: Any) -> Any:
    """Return a whole number as a float: `optimizer.lam=1` on a command line equals the 1.0 of a file."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
