"""A check, made while a network is new, that no layer mixes samples: a mixture would give a silent error."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gramgn.optim._precision import REDUCED_EPS, is_capturing

MAX_TRIES = 8
"""Passes for places whose gradient is zero, as it is deep in a network with a zero last layer."""


class MixingCheck:
    """Weights on the samples must come back as weights on the rows of every layer's output gradient.

    Args:
        keys: The places at which gradients will arrive.
        checked: Places found right in earlier steps; those found now are added.
        num_samples: b.
        is_reduced: Whether gradients are formed in a shorter format than their own.
    """

    def __init__(
        self, keys: Sequence[Hashable], checked: set[Hashable], num_samples: int, *, is_reduced: bool = False
    ) -> None:
        self._least_eps = REDUCED_EPS["bf16"] if is_reduced else 0.0
        self.weighing = False
        self._checked = checked
        self._tries = ("tries", num_samples, *keys)
        tried = sum((self._tries, i) in checked for i in range(MAX_TRIES))
        new = any(key not in checked for key in keys)
        self.wanted = num_samples > 1 and new and tried < MAX_TRIES and not is_capturing()
        if self.wanted:
            checked.add((self._tries, tried))
        # Multiples of the golden ratio, modulo 1, keep near and far rows apart without random numbers.
        self._weights = 1 + (torch.arange(num_samples, dtype=torch.float64) * 0.618034) % 1
        self._norms: tuple[dict[Hashable, Tensor], dict[Hashable, Tensor]] = ({}, {})

    def weighted(self, slopes: Tensor) -> Tensor:
        """Return slopes [b, q] with a weight on each sample."""
        return slopes * self._weights.to(slopes.device, slopes.dtype)[:, None]

    def sees(self, key: Hashable, grad: Tensor) -> bool:
        """Note a gradient's norms by sample; return whether that is all it is for."""
        if self.wanted and (self.weighing or key not in self._norms[1]):
            norms = (
                torch.linalg.vector_norm(grad.detach(), dim=tuple(range(1, grad.ndim)))
                if grad.ndim > 1
                else grad.abs()
            )
            self._norms[1 - self.weighing].setdefault(key, norms)
        return self.weighing

    def finish(self) -> None:
        """Compare, and remember what was found right.

        Raises:
            ValueError: A gradient's rows did not follow the weights.
        """
        weighted, plain = self._norms
        for key, given in weighted.items():
            norms = plain.get(key)
            if norms is None or not bool((norms > 0).any()) or not bool(torch.isfinite(norms).all()):
                continue
            error = (given - norms * self._weights.to(norms.device, norms.dtype)).abs().max()
            if error > max(torch.finfo(norms.dtype).eps, self._least_eps) ** 0.5 * norms.max():
                raise ValueError(
                    f"at {key} the gradient of one sample depends on other samples: the network mixes samples "
                    "(such as x - x.mean(dim=0)) or has another dimension than the samples' in front. Each "
                    "output must depend on its own sample only"
                )
            self._checked.add(key)
