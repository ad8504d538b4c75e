"""What makes a job of a sweep the one it is: its configuration without what changes no result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Where, how loudly and under which name a job runs. A key stands for everything below it.
INCIDENTAL = ("tracking", "resume", "name", "on_failure", "trainer.device", "trainer.threads")


def override_key(override: str) -> str:
    """Return the key of an override, e.g. ``"optimizer.lam"`` of ``"++optimizer.lam=1"``."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0].replace("/", ".")


def path_override(key: str, path: object) -> str:
    """Return an override to paste into a shell, in quotes where Hydra or the shell would stumble over the path.

    The folder of a job of a sweep has ``=`` and commas, which Hydra takes only inside quotes.
    """
    text = str(path)
    return f"{key}={text}" if re.fullmatch(r"[\w./+@%-]+", text, re.ASCII) else f"\"{key}='{text}'\""


def is_incidental(key: str) -> bool:
    """Tell whether a dotted key changes no result of a job."""
    return any(key == name or key.startswith(f"{name}.") for name in INCIDENTAL)


def identifying(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that identify a job or a sweep, sorted, each once."""
    return sorted({str(each) for each in overrides if not is_incidental(override_key(str(each)))})


def short_hash(parts: Iterable[str]) -> str:
    """Return 8 hexadecimal digits for a list of texts, for the names of folders."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted keys, without what changes no result."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if is_incidental(key):
            continue
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of a configuration as recorded (without this machine's paths); equal means the same job."""
    return hashlib.sha256(json.dumps(flat(config), sort_keys=True).encode()).hexdigest()


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two configurations differ, with both values; an absent one is ``None``."""
    first, second = flat(one), flat(other)
    # As JSON, so that what was written to run.json and read back equals what was written.
    keys = [key for key in first | second if _text(first, key) != _text(second, key)]
    return {key: (first.get(key), second.get(key)) for key in sorted(keys)}


def _text(config: Mapping[str, Any], key: str) -> str | None:
    return json.dumps(config[key], sort_keys=True) if key in config else None
