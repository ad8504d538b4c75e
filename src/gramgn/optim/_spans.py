"""Names for the parts of a step in ``torch.profiler``, free of cost while nothing is profiled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that a running profiler sees as ``gramgn.<part>``.

    Args:
        name: ``gramgn.forward``, ``backward``, ``blocks`` and ``gram`` (both inside of backward), ``solve`` or
            ``update``.
    """
    return record_function(name) if torch.autograd._profiler_enabled() else _NOTHING  # type: ignore[attr-defined]
