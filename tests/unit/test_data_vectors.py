"""Vector data made in memory: on the sphere and in the ball, bounded, the same every time."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from gramgn.data import Digits, RegressionData, Sphere
from gramgn.errors import ConfigError, DataError


def train(data: RegressionData) -> tuple[np.ndarray, np.ndarray]:
    rows = data.split == "train"
    return data.images[rows], data.targets[rows]


@pytest.mark.parametrize("targets", ["wave", "random"])
def test_sphere(targets: Any) -> None:
    data = Sphere(dim=7, num_points=300, num_val=11, num_test=12, targets=targets).load(64)
    assert data.images.shape == (323, 7)
    assert data.images.dtype == data.targets.dtype == np.float64
    assert np.allclose(np.linalg.norm(data.images, axis=1), 1, atol=1e-15)
    assert 0.5 < np.abs(data.targets).max() <= 1
    assert abs(train(data)[1].mean()) < 0.2
    assert [int((data.split == name).sum()) for name in ("train", "val", "test")] == [300, 11, 12]
    assert len(set(data.keys)) == 323
    assert (data.kind, data.unit) == ("synthetic", "1")


@pytest.mark.parametrize(("targets", "is_a_wave"), [("wave", True), ("random", False)])
def test_sphere_targets_are_what_they_say(targets: Any, is_a_wave: bool) -> None:
    """One direction v explains the wave in all splits, found on a grid of angles; none explains random targets."""
    data = Sphere(dim=2, num_points=60, targets=targets).load(0)
    angles = np.linspace(0, 2 * np.pi, 5000)
    v = np.stack([np.cos(angles), np.sin(angles)])
    misses = np.abs(np.sin(2 * np.sqrt(2) * data.images @ v) - data.targets[:, None]).max(axis=0)
    assert (misses.min() < 5e-3) == is_a_wave


def test_more_points_begin_with_the_same_ones() -> None:
    few, many = (train(Sphere(num_points=n).load(0)) for n in (30, 100))
    for a, b in zip(few, many, strict=True):
        assert np.array_equal(a, b[:30])


def test_identity_follows_the_data() -> None:
    same = {Sphere().load(0).manifest_sha256, Sphere().load(32).manifest_sha256}
    others = {
        Sphere(**options).load(0).manifest_sha256  # type: ignore[arg-type]
        for options in ({"seed": 1}, {"dim": 19}, {"num_points": 99}, {"targets": "random"}, {"num_test": 49})
    }
    assert len(same) == 1
    assert len(others | same) == 6


def test_splits_share_no_point() -> None:
    data = Sphere(num_points=50, num_val=50, num_test=50).load(0)
    assert len(np.unique(data.images, axis=0)) == 150


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 1}, "dataset.dim=1: must be an integer, at least 2"),
        ({"num_points": 0}, "dataset.num_points=0"),
        ({"num_test": 0}, "dataset.num_test=0"),
        ({"targets": "waves"}, "dataset.targets=waves: allowed are wave, random.*did you mean 'wave'"),
        ({"seed": -1}, "dataset.seed=-1"),
        ({"name": "a b"}, "dataset.name='a b'"),
    ],
)
def test_sphere_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sphere(**options)


@pytest.mark.parametrize("options", [{"dim": 32}, {"limit": 0}, {"split_seed": -1}])
def test_digits_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"dataset.{next(iter(options))}="):
        Digits(**options)


def test_nothing_to_prepare() -> None:
    with pytest.raises(ConfigError, match="dataset sphere is made in memory and needs no preparation"):
        Sphere().prepare(64)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for function in (Digits().check, Digits().load):
        with pytest.raises(
            DataError, match=r"scikit-learn, which is not installed.*\[theory\].*dataset=sphere"
        ):
            function(64)


def test_digits() -> None:
    pytest.importorskip("sklearn", reason="needs the extra theory: pip install -e .[theory]")
    data = Digits().load(64)
    lengths = np.linalg.norm(data.images, axis=1)
    assert data.images.shape == (1797, 64)
    assert lengths.max() == pytest.approx(1.0, abs=1e-15)
    assert lengths.min() > 0.3
    assert sorted(set(data.targets)) == list(range(10))
    assert (data.kind, data.unit) == ("real", "digit")
    shares = [float((data.split == name).mean()) for name in ("train", "val", "test")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    some = Digits(limit=100).load(64)
    rows = np.isin(data.keys, some.keys)
    assert rows.sum() == 100
    assert np.array_equal(data.images[rows], some.images)
    assert "sklearn" in sys.modules
