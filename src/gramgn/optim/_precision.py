"""In which precision things are computed: J as the user's flags say, the Gram product and the solve not.

The Gram matrix spans many decades, and its small end decides the step, so reduced precision (TF32, bfloat16)
in products of J is never silent: it is switched off here. Blocks are multiplied in float32 (float64 for
float64 networks), their products are summed and solved in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

# What is lost, relatively, where float32 operations that form J are carried out in a shorter format.
REDUCED_EPS = {"tf32": 3e-4, "bf16": 3e-3}


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which blocks of J of this dtype are multiplied: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def float64_home(device: torch.device) -> torch.device:
    """Return where float64 work is done: on ``device`` itself, for Apple's MPS on the CPU."""
    return torch.device("cpu") if device.type == "mps" else device


def jacobian_eps(
    model: nn.Module, dtype: torch.dtype, device: torch.device, reduced: torch.dtype | None = None
) -> float:
    """Return the relative precision of J: of its dtype, or of the shorter format that flags let float32 use.

    Args:
        model: The network; convolutions have flags of their own.
        dtype: The dtype of J.
        device: Where it is formed.
        reduced: The format of autocast while J was formed, if any.
    """
    if reduced is not None:
        return max(torch.finfo(dtype).eps, REDUCED_EPS["bf16"])
    eps = torch.finfo(dtype).eps
    if dtype != torch.float32:
        return eps
    backends: Any = torch.backends
    if device.type == "cuda":
        matmul, conv = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    else:
        matmul, conv = backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
    has_conv = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return max(eps, REDUCED_EPS.get(matmul, 0.0), REDUCED_EPS.get(conv, 0.0) if has_conv else 0.0)


def reduced_precision(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return autocast to ``dtype`` on ``device``, or nothing for None. Only for forming J, never for G."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def full_precision_products() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside the context, whatever the flags allow outside of it."""
    torch_backends: Any = torch.backends
    backends = (torch_backends.cuda.matmul, torch_backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: nothing may wait for the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
