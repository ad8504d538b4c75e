"""Starts ranks on this machine and collects what each of them returns."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 240


def run_ranks(size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Return what `function(rank, *args)` returns on each of `size` ranks over gloo; raise the first error of any."""
    context = multiprocessing.get_context("spawn")
    store = folder / f"store-{function.__name__}-{size}"
    processes = [
        context.Process(target=_rank, args=(rank, size, store, function, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    errors, results = [], []
    for rank in range(size):
        path = store.with_name(f"{store.name}.{rank}")
        kind, value = (
            pickle.loads(path.read_bytes()) if path.exists() else ("error", "ended without a result")
        )
        results.append(value)
        if kind == "error":
            errors.append(f"rank {rank}: {value}")
    if hanging:
        errors.append(f"hanging: {hanging}")
    assert not errors, "\n".join(errors)
    return results


def _rank(rank: int, size: int, store: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        result = ("result", function(rank, *args))
    except BaseException:
        result = ("error", traceback.format_exc())
    path = store.with_name(f"{store.name}.{rank}")
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(pickle.dumps(result))
    part.rename(path)
    if result[0] == "result":
        dist.barrier()
    # Without destructors, in which gloo may crash.
    os._exit(0)
