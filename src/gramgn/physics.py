"""Derivatives by the inputs and points for residuals of differential equations; needs torch alone.

Derivatives are of functions of one sample, as a `gramgn.Term` calls them; they compose with each other and with
`torch.func`. Points come in the leading dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

Field = Callable[[Tensor], Tensor]
Bounds = Sequence[float] | Tensor


def gradient(u: Field, x: Tensor) -> Tensor:
    """Return the derivative of u at x by one backward pass per output.

    Args:
        u: A function of one sample; returns a number ([] or [1]) or k numbers [k].
        x: One sample, of any shape.

    Returns:
        In the shape of `x`; for k > 1 outputs [k, *shape of x].
    """
    value, pull = vjp(u, x)  # type: ignore[misc]
    if value.numel() == 1:
        return pull(torch.ones_like(value))[0]
    rows = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
    (derivative,) = vmap(pull)(rows.view(-1, *value.shape))
    return derivative.view(*value.shape, *x.shape)


def divergence(field: Field, x: Tensor) -> Tensor:
    """Return the sum of the derivatives of field_i by x_i at x, a number, by one forward pass per entry of x.

    Args:
        field: A function of one sample that returns a tensor in the shape of `x`.
        x: One sample, of any shape.

    Raises:
        ValueError: `field` returns another shape.
    """

    def along(e: Tensor) -> Tensor:
        value, derivative = jvp(field, (x,), (e,))  # type: ignore[misc]
        if value.shape != x.shape:
            raise ValueError(
                f"divergence needs a field in the shape of x, {list(x.shape)}, got {list(value.shape)}"
            )
        return (derivative * e).sum()

    return vmap(along)(_basis(x)).sum()


def laplacian(u: Field, x: Tensor) -> Tensor:
    """Return the sum of the second derivatives of u by each entry of x at x.

    One backward pass through the gradient per entry of `x` for a number, nested forward mode (second-order Taylor mode)
    for several outputs.

    Args:
        u: A function of one sample; returns a number ([] or [1]) or k numbers [k].
        x: One sample, of any shape.

    Returns:
        In the shape of `u(x)`.
    """
    shapes: list[torch.Size] = []

    def number(x: Tensor) -> Tensor:
        value = u(x)
        shapes.append(value.shape)
        return value.sum()

    def first(x: Tensor) -> Tensor:
        value, pull = vjp(number, x)  # type: ignore[misc]
        return pull(torch.ones_like(value))[0]

    _, pull = vjp(first, x)  # type: ignore[misc]
    shape = shapes[0]
    if shape.numel() == 1:
        second = vmap(lambda e: (pull(e)[0] * e).sum())(_basis(x)).sum()
        return second.view(shape)

    def along(e: Tensor) -> Tensor:
        return jvp(lambda x: jvp(u, (x,), (e,))[1], (x,), (e,))[1]

    return vmap(along)(_basis(x)).sum(dim=0)


def points_in_box(
    number: int,
    low: Bounds,
    high: Bounds,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return points [number, d], uniform in the box between the corners `low` and `high`.

    Args:
        number: The number of points.
        low: The lowest corner, d numbers.
        high: The highest corner, d numbers.
        generator: Of torch, on the same device; None (default): torch's own.
        dtype: None (default): torch's default.
        device: None (default): that of `generator`, else torch's default.

    Raises:
        ValueError: The corners do not span a box.
    """
    low, high = _corners(low, high, dtype, _home(generator, device))
    unit = torch.rand(number, len(low), generator=generator, dtype=low.dtype, device=low.device)
    return low + unit * (high - low)


def points_on_box(
    number: int,
    low: Bounds,
    high: Bounds,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return points [number, d], uniform on the surface of a box; for d = 1 each is one of the two ends.

    The arguments, and what is raised, are those of `points_in_box`.
    """
    points = points_in_box(number, low, high, generator=generator, dtype=dtype, device=device)
    low, high = _corners(low, high, points.dtype, points.device)
    # The area of the faces across axis i is a constant divided by the length of axis i.
    axis = torch.multinomial(1 / (high - low), number, replacement=True, generator=generator)
    upper = torch.rand(number, generator=generator, dtype=points.dtype, device=points.device) < 0.5
    end = torch.where(upper, high[axis], low[axis])
    return points.scatter(1, axis[:, None], end[:, None])


def points_on_sphere(
    number: int,
    center: Bounds,
    radius: float = 1.0,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return points [number, d], uniform on the sphere around `center` (d numbers).

    The other arguments are those of `points_in_box`.

    Raises:
        ValueError: `radius` is not positive.
    """
    if not (radius > 0 and math.isfinite(radius)):
        raise ValueError(f"radius must be a finite number > 0, got {radius!r}")
    center = torch.as_tensor(
        center, dtype=dtype or torch.get_default_dtype(), device=_home(generator, device)
    )
    normal = torch.randn(number, len(center), generator=generator, dtype=center.dtype, device=center.device)
    return center + radius * normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True)


def _basis(x: Tensor) -> Tensor:
    """Return the unit vectors in the shape of x, [size, *shape]."""
    return torch.eye(x.numel(), dtype=x.dtype, device=x.device).view(-1, *x.shape)


def _home(generator: torch.Generator | None, device: torch.device | str | None) -> torch.device | str | None:
    return generator.device if device is None and generator is not None else device


def _corners(
    low: Bounds, high: Bounds, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    dtype = dtype or torch.get_default_dtype()
    corners = [torch.as_tensor(corner, dtype=dtype, device=device) for corner in (low, high)]
    low, high = corners
    if low.ndim != 1 or low.shape != high.shape or not bool((low < high).all()):
        raise ValueError(
            f"low and high must be corners of a box, d numbers each with low < high, got {low.tolist()} and "
            f"{high.tolist()}"
        )
    return low, high
