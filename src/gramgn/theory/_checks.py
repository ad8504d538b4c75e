"""What every function of the theory asks of its input, said once."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def check_float64(**tensors: Tensor) -> None:
    """Refuse anything but finite float64.

    Raises:
        ValueError: The least eigenvalue of G is lost in float32's rounding on ordinary data, so nothing is computed
            in it; or an entry is not finite.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float64:
            raise ValueError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and the theory's quantities need float64 "
                "(their small eigenvalues are rounding otherwise): use .double() on data and network, "
                "trainer.dtype=float64 in a run"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} has entries that are not finite")


def check_samples(x: Tensor) -> None:
    """Refuse anything but a matrix of samples [n, d] with n, d >= 1 in float64.

    Raises:
        ValueError: Another shape, another dtype, or an entry that is not finite.
    """
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be samples [n, d] with at least one entry, got shape {list(x.shape)}")
    check_float64(x=x)


def repeated_rows(x: Tensor) -> list[tuple[int, int]]:
    """Return pairs (i, j), i < j, of rows of x [n, d] that are equal or opposite, each j with the first such i.

    Opposite rows count because their rows of J are linearly dependent where sigma' is even (erf, tanh).
    """
    lead = x.gather(1, (x != 0).to(torch.int8).argmax(dim=1, keepdim=True))
    _, group = torch.unique(torch.where(lead < 0, -x, x), dim=0, return_inverse=True)
    first: dict[int, int] = {}
    pairs = [(first.setdefault(label, j), j) for j, label in enumerate(group.tolist())]
    return [(i, j) for i, j in pairs if i != j]


def is_singular(least: float, largest: float, n: int) -> bool:
    """Tell whether the least eigenvalue of a Gram matrix [n, n] is zero up to rounding."""
    return least <= n * EPS * largest
