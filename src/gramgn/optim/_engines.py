"""The engines by name, and their options."""

from __future__ import annotations

from typing import Any

import torch

from gramgn.optim._loop_engine import LoopEngine
from gramgn.optim._vmap_engine import VmapEngine
from gramgn.optim.gram import Engine
from gramgn.optim.stream import CONV_PATHS, StreamEngine

ENGINE_NAMES = ("stream", "vmap", "loop")
JACOBIAN_DTYPES = {"bfloat16": torch.bfloat16}


def make_engine(
    name: Any, *, chunk_size: Any, conv_path: Any, low_memory: Any, jacobian_dtype: Any
) -> Engine:
    """Return the engine called ``name``.

    Args:
        name: ``"stream"``, ``"vmap"``, or ``"loop"`` for the slow oracle.
        chunk_size: Samples at a time, None: all; ``"auto"``: what fits, for ``"stream"``.
        conv_path: See ``StreamEngine``.
        low_memory: Whether to hold no J, for ``"stream"``.
        jacobian_dtype: None, or a shorter format to form J in, for ``"stream"``.

    Raises:
        ValueError: An unknown name, a value out of range, or an option that the engine does not have.
    """
    if not isinstance(name, str) or name not in ENGINE_NAMES:
        raise ValueError(f"engine must be one of {_listed(ENGINE_NAMES)}, got {name!r}")
    if not isinstance(conv_path, str) or conv_path not in CONV_PATHS:
        raise ValueError(f"conv_path must be one of {_listed(CONV_PATHS)}, got {conv_path!r}")
    if not isinstance(low_memory, bool):
        raise ValueError(f"low_memory must be True or False, got {low_memory!r}")
    dtype = _dtype(jacobian_dtype)
    _check_chunk_size(name, chunk_size)
    if name == "stream":
        if low_memory and chunk_size is not None:
            raise ValueError(
                "low_memory=True keeps the graph of the whole batch, so chunk_size can bound nothing: set "
                "chunk_size to None (null in a configuration), or low_memory to False"
            )
        return StreamEngine(
            chunk_size=chunk_size, conv_path=conv_path, low_memory=low_memory, jacobian_dtype=dtype
        )
    for option, value, default in (
        ("conv_path", conv_path, "static"),
        ("low_memory", low_memory, False),
        ("jacobian_dtype", dtype, None),
    ):
        if value != default:
            raise ValueError(f"{option} is an option of engine='stream'; engine={name!r} does not have it")
    return VmapEngine(chunk_size) if name == "vmap" else LoopEngine()


def _check_chunk_size(engine: str, chunk_size: Any) -> None:
    if chunk_size is None or (chunk_size == "auto" and engine == "stream"):
        return
    if engine == "loop":
        raise ValueError(
            "chunk_size is an option of engine='stream' and 'vmap'; engine='loop' goes through one row at a time"
        )
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        auto = ", 'auto'" if engine == "stream" else ""
        raise ValueError(f"chunk_size must be None{auto} or a whole number of at least 1, got {chunk_size!r}")


def _dtype(given: Any) -> torch.dtype | None:
    if given is None or (isinstance(given, torch.dtype) and given in JACOBIAN_DTYPES.values()):
        return given
    if isinstance(given, str) and given in JACOBIAN_DTYPES:
        return JACOBIAN_DTYPES[given]
    raise ValueError(f"jacobian_dtype must be None or {_listed(tuple(JACOBIAN_DTYPES))}, got {given!r}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
