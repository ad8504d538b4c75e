"""How many samples fit into memory, and what to say when it runs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

SHARE = 4
"""Activations may take one part in so many of the memory that is free."""


def samples_that_fit(num_samples: int, model: nn.Module, forward_of_one: Callable[[], Tensor]) -> int:
    """Return how many samples' activations fit into a quarter of the free memory, from 1 to all.

    Args:
        num_samples: b.
        model: Its parameters and buffers are there anyway.
        forward_of_one: Runs the network on one sample, gradients recorded; random numbers it draws are put
            back.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    cards = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with (
        torch.random.fork_rng(devices=cards),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        device = forward_of_one().device
    return max(1, min(num_samples, free_bytes(device) // SHARE // max(1, sum(storages.values()))))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be had on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@contextmanager
def explained_out_of_memory(params: Mapping[str, Tensor], residual: Tensor | None = None) -> Iterator[None]:
    """Turn running out of memory into an error that names sizes and what to lower.

    Args:
        params: The trainable parameters, m entries in all.
        residual: The residuals, where they are known.

    Raises:
        torch.OutOfMemoryError: In place of the allocator's own error, which stays attached as the cause.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        m = sum(param.numel() for param in params.values())
        row_bytes = sum(param.numel() * param.element_size() for param in params.values())
        if residual is None:
            size = f"J takes {row_bytes / 2**20:.4g} MiB for each row (one for each sample and output)"
        else:
            rows = residual.numel()
            size = (
                f"J takes about {rows * row_bytes / 2**20:.4g} MiB for {len(residual)} samples ({rows} rows)"
            )
        raise torch.OutOfMemoryError(
            f"out of memory while forming the Jacobian of {m} parameters: {size}, the activations come on "
            "top. Lower chunk_size (samples at a time, bounds the activations; 'auto' chooses), take "
            "low_memory=True (J is not held) or lower the batch size (bounds J)"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, on whatever device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
