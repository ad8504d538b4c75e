"""The optimizer on a fake CUDA device: devices, dtypes and waits by torch's fake tensors, values by the CPU.

A step on the fake device must be the step on the CPU. What only a card can show is in `tests/gpu`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, fake_cuda, values
from torch import Tensor, nn

from gramgn import GramGaussNewton
from gramgn.optim import experimental

NUM_STEPS = 3
WAITS = {
    "solve.solve_system",
    "solve._damped",
    "algorithm.linear_model",
    "algorithm._norm_without_direction",
    "losses.modelled_decrease",
    "info.report",
}
"""The functions that wait for the device in a step, each once: the solve, and what is reported about the step."""


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """Provide the fake device."""
    with fake_cuda() as mode:
        yield mode


class Mixed(nn.Module):
    """Layers of every rule and a parameter of the network itself; random numbers if `p` > 0."""

    def __init__(self, num_outputs: int = 1, p: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 1),
            nn.Conv2d(6, 6, 3, 2, 1, groups=3),
        )
        self.dropout, self.scale = nn.Dropout(p), nn.Parameter(torch.ones(1))
        self.last = nn.Linear(6, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to outputs [b, k], for one output [b]."""
        outputs: Tensor = self.scale * self.last(self.dropout(self.features(x).relu().mean(dim=(2, 3))))
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs


def problem(**options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Mixed(**options)
    x = torch.randn(5, 2, 8, 8)
    return model, x, torch.randn(model(x).shape)


def train(
    model: nn.Module, x: Tensor, y: Tensor, cuda: FakeCuda | None = None, **options: Any
) -> tuple[list[Any], GramGaussNewton]:
    """Take steps and return their reports; `cuda.waits` is then about the last one."""
    torch.manual_seed(1)
    optimizer = GramGaussNewton(model, **{"lam": 1.0, "alpha": 0.3, **options})
    infos = []
    for _ in range(NUM_STEPS):
        if cuda:
            cuda.waits.clear()
        infos.append(optimizer.step(lambda: model(x) - y))
    return infos, optimizer


def check_same(cuda: FakeCuda, options: dict[str, Any], **network_options: Any) -> None:
    """Compare steps on the fake device with steps on the CPU."""
    model, x, y = problem(**network_options)
    other, other_x, other_y = copy.deepcopy(model).to(CUDA), x.to(CUDA), y.to(CUDA)
    expected, _ = train(model, x, y, **options)
    infos, optimizer = train(other, other_x, other_y, cuda, **options)
    for info, on_cpu in zip(infos, expected, strict=True):
        assert info.gram.device == CUDA
        assert info.gram.dtype == torch.float64
        assert info.loss == pytest.approx(on_cpu.loss, rel=1e-3)
        assert info.status == on_cpu.status
    for (name, param), on_cpu in zip(other.named_parameters(), model.parameters(), strict=True):
        assert param.device == CUDA
        torch.testing.assert_close(values(param), on_cpu.detach(), rtol=1e-3, atol=1e-5, msg=name)
    for state in optimizer.state.values():
        assert all(tensor.device == CUDA for tensor in state.values() if isinstance(tensor, Tensor))


ENGINES = {
    "stream": {},
    "no small blocks": {"conv_path": "columns"},
    "probe": {"conv_path": "probe"},
    "low memory": {"memory_budget": "least"},
    "chunks": {"chunk_size": 2},
    "chunks that fit": {"chunk_size": "auto"},
    "vmap": {"name": "vmap"},
    "vmap in chunks": {"name": "vmap", "chunk_size": 2},
    "loop": {"name": "loop"},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_steps_as_on_the_cpu(cuda: FakeCuda, engine: str) -> None:
    check_same(cuda, {"engine": ENGINES[engine]})
    own = {"vmap.linearised"} if "vmap" in engine else set()
    assert sorted(cuda.waits) == sorted(WAITS | own)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"adaptive_damping": {"factor": 2.0}},
        {"line_search": "armijo"},
        {"alpha": 0.0},
    ],
    ids=str,
)
def test_every_variant_steps_as_on_the_cpu(cuda: FakeCuda, options: dict[str, Any]) -> None:
    check_same(cuda, options)


def test_random_numbers_and_several_outputs(cuda: FakeCuda) -> None:
    check_same(cuda, {}, num_outputs=3, p=0.5)


@pytest.mark.usefixtures("cuda")
def test_classes() -> None:
    model, x, _ = problem(num_outputs=3)
    labels = torch.arange(len(x)) % 3
    other, other_x = copy.deepcopy(model).to(CUDA), x.to(CUDA)
    losses = []
    for network, inputs in ((model, x), (other, other_x)):
        optimizer = GramGaussNewton(network, lam=1.0, alpha=0.3, loss="cross_entropy")
        # The labels may stay on the CPU.
        losses.append(
            [optimizer.step(lambda f=network, x=inputs: (f(x), labels)).loss for _ in range(NUM_STEPS)]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.usefixtures("cuda")
def test_parameters_on_two_devices_are_rejected() -> None:
    model, _, _ = problem()
    other = copy.deepcopy(model).to(CUDA)
    other.last = model.last
    with pytest.raises(ValueError, match="cpu, cuda:0"):
        GramGaussNewton(other, lam=1.0, alpha=0.3)


@pytest.mark.usefixtures("cuda")
def test_a_target_on_another_device_changes_nothing() -> None:
    model, x, y = problem()
    other, other_x = copy.deepcopy(model).to(CUDA), x.to(CUDA)
    optimizer = GramGaussNewton(other, lam=1.0, alpha=0.3)
    with pytest.raises(RuntimeError, match="cuda:0"):
        optimizer.step(lambda: other(other_x) - y)
    for param, before in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(values(param), before)


class Replayed(experimental.CudaGraph[Any]):
    """A graph whose replay does the work again, with the rules of a capture."""

    def __init__(self, function: Any) -> None:
        self.function = function
        super().__init__(function)

    def replay(self) -> None:
        super().replay()
        with torch.cuda.graph(self._graph):
            self.result = self.function()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"adaptive_damping": {"factor": 3.0}}], ids=str)
def test_captured_steps_wait_for_nothing_in_their_graphs(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experimental, "CudaGraph", Replayed)
    model, x, y = problem()
    expected, _ = train(model, x, y, **options)
    model, x, y = problem()
    other, other_x, other_y = copy.deepcopy(model).to(CUDA), x.to(CUDA), y.to(CUDA)
    optimizer = GramGaussNewton(other, lam=1.0, alpha=0.3, **options)
    step = optimizer.experimental_capture(lambda x, y: other(x) - y, other_x, other_y)
    for on_cpu in expected:
        info = step(other_x, other_y)
        assert info.loss == pytest.approx(on_cpu.loss, rel=1e-3)
        assert info.gram.device == CUDA
