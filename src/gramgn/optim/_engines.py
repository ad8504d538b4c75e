"""The engines by name."""

from __future__ import annotations

from typing import Any

from gramgn.optim._engine import Engine
from gramgn.optim._loop_engine import LoopEngine
from gramgn.optim._stream import StreamEngine
from gramgn.optim._vmap_engine import VmapEngine

ENGINE_NAMES = ("vmap", "stream", "loop")


def make_engine(name: Any, chunk_size: Any) -> Engine:
    """Return the engine called ``name``.

    Args:
        name: ``"vmap"``, ``"stream"``, or ``"loop"`` for the slow oracle.
        chunk_size: Samples at a time, None: all; only for ``"vmap"``.

    Raises:
        ValueError: An unknown engine, or a chunk size that is no whole number of at least 1.
    """
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
    ):
        raise ValueError(f"chunk_size must be None or a whole number of at least 1, got {chunk_size!r}")
    if name == "vmap":
        return VmapEngine(chunk_size)
    if name == "stream":
        if chunk_size is not None:
            raise ValueError(
                "chunk_size is an option of engine='vmap'; engine='stream' takes the whole batch at once: set "
                "chunk_size to None (null in a configuration)"
            )
        return StreamEngine()
    if name == "loop":
        if chunk_size is not None:
            raise ValueError(
                "chunk_size is an option of engine='vmap'; engine='loop' goes through one row at a time"
            )
        return LoopEngine()
    raise ValueError(f"engine must be one of {', '.join(map(repr, ENGINE_NAMES))}, got {name!r}")
