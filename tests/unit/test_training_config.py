"""The trainer's settings and the process-wide switches they set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gramgn.errors import ConfigError
from gramgn.training import TrainerConfig, apply_settings, choose_device


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", True),
        ("batch_size", 0),
        ("batch_size", "half"),
        ("image_size", 4),
        ("order", "random"),
        ("dtype", "bfloat16"),
        ("threads", 0),
        ("eval_every", 0),
        ("deterministic", "yes"),
        ("tf32", 1),
        ("channels_last", "yes"),
        ("compile", 1),
    ],
)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{name}={value!r} must be"):
        TrainerConfig(**{name: value})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(epochs=0, order="x", threads=-1)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(("given", "expected"), [("full", 1000), (128, 128), (4096, 1000)])
def test_batch_size(given: Any, expected: int) -> None:
    """G05: a batch is never larger than the split."""
    assert TrainerConfig(batch_size=given).batch_size_for(1000) == expected


def test_determinism_is_set_in_both_directions() -> None:
    """T14: true sets everything itself, false really turns it off."""
    try:
        assert apply_settings(TrainerConfig(deterministic=True)).deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
    finally:
        precision = apply_settings(TrainerConfig(deterministic=False))
    assert not precision.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_tf32_is_off_unless_asked_for() -> None:
    """G10: precision flags are explicit."""
    apply_settings(TrainerConfig(tf32=True))
    assert torch.backends.cuda.matmul.allow_tf32
    apply_settings(TrainerConfig())
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["gpu", "xla", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.device='{name}'"):
        choose_device(name)
