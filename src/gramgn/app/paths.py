"""The repository: the base of every relative path in a configuration (H14)."""

from __future__ import annotations

from pathlib import Path

_root: Path | None = None


def set_repository(root: str | Path) -> None:
    """Declare the folder that holds `conf/`, `data/` and `outputs/`; the entry points do this once."""
    global _root  # one process serves one repository
    _root = Path(root).resolve()


def repository() -> Path:
    """Return the repository's folder, absolute."""
    return Path.cwd() if _root is None else _root


def absolute(path: str | Path) -> Path:
    """Return `path` as it is if absolute, else below the repository, whatever the working directory."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else repository() / path


def shown(path: str | Path) -> str:
    """Return a path for messages: relative to the working directory if it lies below it."""
    path = Path(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # elsewhere, or the working directory is gone
        return str(path)
