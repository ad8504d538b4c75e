"""Provenance of a result: code, versions, time; no host names, user names or paths of the machine."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "numpy": "numpy",
    "pillow": "pillow",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "wandb": "wandb",
}
# A figure drawn since the commit does not change what a run does.
_NOT_RESULTS = ":(exclude)outputs"
# Content of an untracked file larger than this is not part of the hash (its name and size are).
_UNTRACKED_BYTES = 1 << 20
# A slash that begins a path: not inside a word or a relative path, not the "//" of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.~/-])(?!//)/(?:[^\s'\"`,;:()\[\]{}=<>|]+/)+[^\s'\"`,;:()\[\]{}=<>|]*")
_HOME = re.compile(r"^/(?:home|Users)/[^/]+/?$|^/root/?$")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package and its dependencies, without importing any; None: not installed."""
    from gramgn import __version__

    found: dict[str, str | None] = {"gramgn": __version__, "python": platform.python_version()}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def start_record() -> dict[str, Any]:
    """Return one entry of `starts` in run.json: when this process started or resumed the run, and its versions."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # Not platform.platform(): the kernel's build string can carry a machine's or a company's name.
    platform_name = f"{platform.system()} {platform.machine()}"
    return {"time_utc": now.replace("+00:00", "Z"), "platform": platform_name, "versions": versions()}


def processor_name() -> str:
    """Return the CPU's model name, or its architecture if the system does not report the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_state(repo: str | os.PathLike[str], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return which version of the code is running.

    Args:
        repo: The folder of the repository. An enclosing other repository (of a user who installed the package
            inside a project) does not count.
        timeout_s: Seconds that each call of git may take.

    Returns:
        `commit`, `dirty` (tracked changes or untracked files that are not ignored) and `diff_sha256` of
        all that (None if clean). If git cannot determine them, all are None, and `note` gives the reason.
    """
    root = Path(repo).resolve()
    note = "not a git repository of its own"
    try:
        top = _git(root, timeout_s, "rev-parse", "--show-toplevel").decode().strip()
        if Path(top).resolve() == root:
            # Empty before the first commit.
            commit = _git(root, timeout_s, "rev-parse", "--revs-only", "HEAD").decode().strip() or None
            diff = ("diff", "--no-ext-diff", "--no-color", "--binary", "HEAD", "--", ".", _NOT_RESULTS)
            changes = _git(root, timeout_s, *diff) if commit else b""
            others = ("ls-files", "-z", "--others", "--exclude-standard", "--", ".", _NOT_RESULTS)
            untracked = sorted(filter(None, _git(root, timeout_s, *others).split(b"\0")))
            dirty = bool(changes or untracked or not commit)
            digest = _digest(root, changes, untracked) if dirty else None
            return {"commit": commit, "dirty": dirty, "diff_sha256": digest}
    except FileNotFoundError:
        note = "git is not installed"
    except subprocess.TimeoutExpired:
        note = f"git took longer than {timeout_s:g} s"
    except (OSError, subprocess.CalledProcessError):  # its message holds paths of the machine
        note = "not a git repository, or one whose owner git does not trust"
    return {"commit": None, "dirty": None, "diff_sha256": None, "note": note}


def portable(value: Any, repo: str | os.PathLike[str]) -> Any:
    """Return a text, or mappings and lists of texts, without this machine's paths; other types stay as they are.

    A path inside the repository becomes relative to it; any other absolute path is cut to its last name (`~` for a home
    folder). Paths are replaced inside longer texts as well.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        roots = sorted({str(Path(repo).absolute()), str(Path(repo).resolve())}, key=len, reverse=True)
        if value.startswith("/") and "\n" not in value and ": " not in value:
            return _portable_path(value, roots)
        return _ABSOLUTE_PATH.sub(lambda match: _portable_path(match.group(), roots), value)
    if isinstance(value, Mapping):
        return {key: portable(item, repo) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item, repo) for item in value]
    return value


def _portable_path(path: str, roots: list[str]) -> str:
    for root in roots:
        if path == root or path.startswith(root.rstrip("/") + "/"):
            return path[len(root) :].strip("/") or "."
    if _HOME.match(path) or path.rstrip("/") == os.path.expanduser("~").rstrip("/"):  # noqa: PTH111
        return "~"
    return path.rstrip("/").rpartition("/")[2] or path


def _git(root: Path, timeout_s: float, *arguments: str) -> bytes:
    # GIT_DIR and its like point elsewhere when we are started from a git hook.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", *arguments]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=True,
    )
    return done.stdout


def _digest(root: Path, changes: bytes, untracked: list[bytes]) -> str:
    digest = hashlib.sha256(changes)
    for name in untracked:
        path = root / os.fsdecode(name)
        size = path.lstat().st_size if os.path.lexists(path) else -1
        digest.update(b"\0" + name + b"\0" + str(size).encode() + b"\0")
        if 0 <= size <= _UNTRACKED_BYTES and path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
