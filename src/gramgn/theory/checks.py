"""What every function of the theory asks of its input, said once."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
ASYMMETRY = 1e-10
LONGEST = 1e70
"""Of a sample: products of four coordinates stay finite."""


def whole(name: str, value: int, minimum: int) -> int:
    """Return `value` as an int if it is a whole number of at least `minimum`.

    Raises:
        ValueError: It is not; the message names the argument.
    """
    try:
        number = minimum - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return number


def check_tensors(**given: object) -> None:
    """Reject anything but tensors, arrays and lists included.

    Raises:
        TypeError: It is something else.
    """
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a torch tensor, got {type(value).__name__}: use torch.as_tensor({name}, "
                "dtype=torch.float64)"
            )


def check_float64(**tensors: Tensor) -> None:
    """Reject anything but finite float64.

    Raises:
        TypeError: It is no tensor.
        ValueError: The least eigenvalue of G is lost in float32's rounding on ordinary data, so nothing is computed
            in it; or an entry is not finite.
    """
    check_tensors(**tensors)
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
    """Reject anything but a matrix of samples [n, d] with n, d >= 1 in float64.

    Raises:
        TypeError: It is no tensor.
        ValueError: Another shape, another dtype, an entry that is not finite, or so large that products overflow.
    """
    check_tensors(x=x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be samples [n, d] with at least one entry, got shape {list(x.shape)}")
    check_float64(x=x)
    largest = float(x.detach().abs().max())
    if largest > LONGEST:
        raise ValueError(
            f"x has entries as large as {largest:.1e}; the theory takes |x| = O(1): scale the samples"
        )


def checked_gram(G: Tensor) -> Tensor:
    """Return a Gram matrix [n, n], n >= 1, made symmetric to the bit.

    Raises:
        TypeError: It is no tensor.
        ValueError: Another shape or dtype, an entry that is not finite, or it is not symmetric.
    """
    check_tensors(G=G)
    if G.ndim != 2 or G.shape[0] != G.shape[1] or len(G) == 0:
        raise ValueError(f"G must be a square matrix [n, n], got shape {list(G.shape)}")
    check_float64(G=G)
    if float((G - G.T).abs().max()) > ASYMMETRY * float(G.abs().max()):
        raise ValueError("G must be symmetric; gram(model, x) and limit_kernel(x, ...).K are")
    return (G + G.T) / 2


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
    """Return whether the least eigenvalue of a Gram matrix [n, n] is zero up to rounding."""
    return least <= n * EPS * largest


def check_positive(spectrum: Tensor, what: str) -> None:
    """Reject a matrix that is no Gram matrix because an eigenvalue is negative beyond rounding.

    Args:
        spectrum: Its eigenvalues [n], rising.
        what: e.g. `"G"`, for the message.

    Raises:
        ValueError: One is.
    """
    least, scale = float(spectrum[0]), float(spectrum.abs().max())
    # The square root: products of long sums are less exact than n roundings.
    if least < -math.sqrt(EPS) * scale:
        raise ValueError(f"{what} has the eigenvalue {least:.3g}, and a Gram matrix J J^T has none below 0")
