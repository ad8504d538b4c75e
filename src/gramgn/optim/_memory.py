"""What to say when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


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
        if not _is_out_of_memory(error):
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
            "top. Lower chunk_size (samples at a time, bounds the activations) or the batch size (bounds J)"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
