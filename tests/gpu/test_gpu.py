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


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"adaptive_damping": {"factor": 2.0}}], ids=str)
def test_captured_steps_equal_eager_ones(options: dict) -> None:
    """G19: two CUDA graphs, forward to Gram and update, against the same steps launched from Python."""
    apply_settings(TrainerConfig())
    torch.manual_seed(0)
    model = ResNetFixup(depth=8, zero_last_layer=False).cuda()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean", **options)
    other, eager = copy.deepcopy((model, optimizer))
    inputs, targets = (tensor.cuda() for tensor in fixed_batch())
    step = optimizer.experimental_capture(lambda x, y: model(x) - y, inputs, targets)
    for scale in (1.0, 0.5, -1.0):
        info = step(scale * inputs, targets)
        expected = eager.step(lambda scale=scale: other(scale * inputs) - targets)
        assert info.loss == pytest.approx(expected.loss, rel=1e-4)
        assert info.step_norm == pytest.approx(expected.step_norm, rel=1e-2)
    ours, theirs = (torch.nn.utils.parameters_to_vector(net.parameters()) for net in (model, other))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


def test_the_trainer_takes_captured_steps() -> None:
    """G19: trainer.compile=true, with a last batch of another shape."""
    torch.manual_seed(0)
    model = ResNetGN(depth=8).cuda()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
    inputs, targets = (tensor.cuda() for tensor in fixed_batch())
    stepper = Stepper(model, optimizer, compile=True)
    stepper.prepare([(inputs, targets), (inputs[:5], targets[:5])])
    for b in (32, 5, 32):
        assert stepper(inputs[:b], targets[:b]).finite


@pytest.mark.parametrize(
    "options",
    [{"chunk_size": 8}, {"chunk_size": "auto"}, {"memory_budget": "least"}, {"conv_path": "probe"}],
    ids=str,
)
def test_memory_and_speed_options_agree_on_the_device(options: dict) -> None:
    """G02: chunks, low memory and probed paths give the same step."""
    apply_settings(TrainerConfig())
    torch.manual_seed(0)
    model = ResNetFixup(depth=8, zero_last_layer=False).cuda()
    other = copy.deepcopy(model)
    inputs, targets = (tensor.cuda() for tensor in fixed_batch())
    GramGaussNewton(model, lam=1.0, alpha=30.0, damping_convention="sum").step(
        lambda: model(inputs) - targets
    )
    GramGaussNewton(other, lam=1.0, alpha=30.0, damping_convention="sum", engine=options).step(
        lambda: other(inputs) - targets
    )
    ours, theirs = (torch.nn.utils.parameters_to_vector(net.parameters()) for net in (model, other))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
