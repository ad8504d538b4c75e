"""Derivatives against closed forms, and points where they should be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from gramgn.physics import divergence, gradient, laplacian, points_in_box, points_on_box, points_on_sphere

# torch warns of its own code at the first use of forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
A = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("u", "slope", "second"),
    [
        (lambda x: (A * x).sin().sum(), A * (A * X).cos(), -(A**2 * (A * X).sin()).sum()),
        (lambda x: (A @ x).exp()[None], A * (A @ X).exp(), ((A @ A) * (A @ X).exp())[None]),
        (lambda x: (x @ x) ** 2, 4 * (X @ X) * X, 20 * (X @ X)),
        (lambda x: A @ x, A, torch.zeros((), dtype=torch.float64)),
    ],
)
def test_derivatives_of_a_number(u: Callable[[Tensor], Tensor], slope: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(gradient(u, X), slope)
    torch.testing.assert_close(laplacian(u, X), second)


def test_derivatives_of_several_numbers() -> None:
    def u(x: Tensor) -> Tensor:
        return torch.stack([(x**3).sum(), x.prod()])

    expected = torch.stack([3 * X**2, X.prod() / X])
    torch.testing.assert_close(gradient(u, X), expected)
    torch.testing.assert_close(laplacian(u, X), torch.stack([6 * X.sum(), torch.zeros_like(X[0])]))


def test_divergence() -> None:
    torch.testing.assert_close(divergence(lambda x: A * x**2, X), (2 * A * X).sum())
    torch.testing.assert_close(divergence(lambda x: x.roll(1), X), torch.zeros_like(X[0]))
    with pytest.raises(ValueError, match=r"a field in the shape of x, \[3\], got \[2\]"):
        divergence(lambda x: x[:2], X)


def test_samples_of_any_shape() -> None:
    """Such as a number, or positions of particles."""
    x = X[0]
    torch.testing.assert_close(gradient(torch.sin, x), x.cos())
    torch.testing.assert_close(laplacian(torch.sin, x), -x.sin())
    torch.testing.assert_close(divergence(torch.sin, x), x.cos())
    positions = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(gradient(lambda p: (p**2).sum(), positions), 2 * positions)
    torch.testing.assert_close(laplacian(lambda p: (p**2).sum(), positions), torch.tensor(12.0))
    torch.testing.assert_close(divergence(lambda p: p**2, positions), 2 * positions.sum())


def test_they_compose() -> None:
    """The divergence of the gradient is the Laplacian, and all can be mapped and differentiated again."""

    def u(x: Tensor) -> Tensor:
        return (A * x).sin().prod()

    torch.testing.assert_close(divergence(lambda x: gradient(u, x), X), laplacian(u, X))
    torch.testing.assert_close(laplacian(u, X), -(A @ A) * u(X))
    torch.testing.assert_close(grad(lambda x: laplacian(u, x))(X), -(A @ A) * gradient(u, X))
    several = torch.stack([X, 2 * X])
    torch.testing.assert_close(
        vmap(lambda x: laplacian(u, x))(several), torch.stack([laplacian(u, x) for x in several])
    )


def test_points_in_a_box_and_on_it() -> None:
    low, high = [-1.0, 0.0, 2.0], [1.0, 0.5, 6.0]
    given = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    inside, on = points_in_box(4000, low, high, **given), points_on_box(4000, low, high, **given)
    sides = torch.tensor(high).double() - torch.tensor(low).double()
    for points in (inside, on):
        assert points.shape == (4000, 3)
        assert points.dtype == torch.float64
        unit = (points - torch.tensor(low).double()) / sides
        assert bool(((unit >= 0) & (unit <= 1)).all())
        torch.testing.assert_close(unit.mean(dim=0), torch.full((3,), 0.5).double(), atol=0.05, rtol=0)
    assert not bool(((inside == torch.tensor(low)) | (inside == torch.tensor(high))).any())
    at_end = (on == torch.tensor(low)) | (on == torch.tensor(high))
    assert bool((at_end.sum(dim=1) == 1).all())
    # Each pair of faces has its share of the area: 2 x 4, 0.5 x 4 and 2 x 0.5, across the other axis.
    areas = torch.tensor([0.5 * 4, 2 * 4, 2 * 0.5]).double()
    torch.testing.assert_close(at_end.double().mean(dim=0), areas / areas.sum(), atol=0.03, rtol=0)


def test_points_on_an_interval_are_its_ends() -> None:
    assert sorted(set(points_on_box(50, [2.0], [3.0]).flatten().tolist())) == [2.0, 3.0]


def test_points_on_a_sphere() -> None:
    generator = torch.Generator().manual_seed(0)
    points = points_on_sphere(4000, [1.0, 2.0], 3.0, generator=generator)
    assert points.dtype == torch.float32
    away = (points - torch.tensor([1.0, 2.0])) / 3.0
    torch.testing.assert_close(away.norm(dim=1), torch.ones(4000))
    angle = torch.atan2(away[:, 1], away[:, 0]) / (2 * math.pi) + 0.5
    torch.testing.assert_close(angle.sort().values, torch.linspace(0, 1, 4000), atol=0.03, rtol=0)


@pytest.mark.parametrize("draw", [points_in_box, points_on_box, points_on_sphere])
def test_a_seed_repeats_the_points(draw: Callable[..., Tensor]) -> None:
    first, again = (
        draw(5, [0.0, 0.0], *([[1.0, 2.0]] if draw is not points_on_sphere else [1.0]), generator=generator)
        for generator in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    )
    assert torch.equal(first, again)


def test_what_is_no_box_or_sphere() -> None:
    for low, high in (([0.0], [0.0]), ([0.0, 1.0], [1.0]), (0.0, 1.0), ([1.0], [float("nan")])):
        with pytest.raises(ValueError, match="low and high must be corners of a box"):
            points_in_box(3, low, high)
    with pytest.raises(ValueError, match="radius must be a finite number > 0, got -1"):
        points_on_sphere(3, [0.0], -1)
