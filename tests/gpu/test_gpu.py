"""What only a CUDA device can show; skipped without one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from gramgn.models import ResNetFixup, ResNetGN
from gramgn.optim import GramGaussNewton
from gramgn.training import Clock, Stepper, TensorData, TrainerConfig, apply_settings, synchronize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def fixed_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 3, 32, 32, generator=generator), torch.randn(32, generator=generator)


@pytest.mark.parametrize("network", [ResNetFixup, ResNetGN])
def test_a_step_agrees_with_the_cpu_in_float64(network: type[torch.nn.Module]) -> None:
    """G10: same batch, same weights: CUDA float32 against CPU float64, below 1e-3 relative."""
    apply_settings(TrainerConfig())
    torch.manual_seed(0)
    reference = network(depth=8, zero_last_layer=False).double()
    ours = copy.deepcopy(reference).to("cuda", torch.float32)
    before = torch.nn.utils.parameters_to_vector(reference.parameters()).detach().clone()
    inputs, targets = fixed_batch()
    for model, dtype, device in ((reference, torch.float64, "cpu"), (ours, torch.float32, "cuda")):
        x, y = inputs.to(device, dtype), targets.to(device, dtype)
        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
        info = optimizer.step(lambda model=model, x=x, y=y: model(x) - y)
        assert info.gram.dtype == torch.float64
        assert torch.equal(info.gram, info.gram.T) or torch.allclose(info.gram, info.gram.T, rtol=1e-6)
    step = torch.nn.utils.parameters_to_vector(reference.parameters()).detach() - before
    ours_step = torch.nn.utils.parameters_to_vector(ours.parameters()).detach().cpu().double() - before
    assert float((ours_step - step).norm() / step.norm()) < 1e-3


def test_the_array_lies_on_the_device_and_the_clock_waits_for_it() -> None:
    """T04: one uint8 array on the device; seconds are read after the device has finished."""
    rng = np.random.default_rng(0)
    data = TensorData(
        rng.integers(0, 256, (64, 1, 16, 16), dtype=np.uint8),
        rng.normal(size=64),
        np.resize(["train", "train", "val", "test"], 64),
        channels=3,
        device=torch.device("cuda"),
        dtype=torch.float32,
        standardize_targets=True,
    )
    inputs, targets = data.batch("train", torch.arange(8))
    assert inputs.device.type == targets.device.type == "cuda"
    model = ResNetFixup(depth=8).cuda()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01))
    clock = Clock(lambda: synchronize(torch.device("cuda")))
    with clock.part("train"):
        report = stepper(inputs, targets)
    assert report.finite
    assert clock.train_s() > 0
