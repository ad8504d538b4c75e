"""Shapes that a rule can't work with."""

from __future__ import annotations

from torch import Tensor


def check_batched(x: Tensor, ndim: int) -> None:
    """Refuse an input without a dimension for samples, which some layers take for one sample.

    Raises:
        ValueError: ``x`` has another number of dimensions than ``ndim``.
    """
    if x.ndim != ndim:
        raise ValueError(
            f"a layer was called with {list(x.shape)}, without a dimension for samples: give it [1, ...] for "
            "one sample, or take engine='loop'"
        )
