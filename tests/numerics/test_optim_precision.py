"""Precision: float32 Jacobians, float64 sums and solve, and no silent TF32 or bfloat16 in products of J."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import vjp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gramgn import GramGaussNewton
from gramgn.models import ResNetFixup, ResNetGN
from gramgn.optim import BlockLinearisation, Reading, Trained, float64_home, jacobian_eps, note_device


@pytest.fixture
def float32_precision() -> Iterator[None]:
    """Let a test set the global flag, and restore it."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def block_linearisation(rows: int = 40, size: int = 3000) -> BlockLinearisation:
    return linearisation([torch.randn(rows, size, generator=torch.Generator().manual_seed(0))])


def linearisation(blocks: list[Tensor], eps: float = 1e-7) -> BlockLinearisation:
    """Return a Jacobian with one block per parameter, and residuals that are 0."""
    r = blocks[0].new_zeros(len(blocks[0]))
    params = {str(i): block.new_empty(block.shape[1]) for i, block in enumerate(blocks)}
    return BlockLinearisation(
        Reading(r.sum(), r, r), len(r), eps, blocks, Trained(params, (0,) * len(params), 1)
    )


@pytest.mark.usefixtures("float32_precision")
@pytest.mark.parametrize("flag", ["highest", "high", "medium"])
def test_products_of_the_jacobian_ignore_reduced_precision(flag: str) -> None:
    """G10: flags for TF32 or bfloat16 change neither G nor J^T u, and are as before afterwards."""
    J = block_linearisation()
    u = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = J.blocks[0].double()
    torch.set_float32_matmul_precision(flag)
    d = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    (G,), (pulled,), pushed = J.gram(), vjp(J, J.trained, u), J.jvp([d])
    assert torch.get_float32_matmul_precision() == flag
    assert torch.backends.cuda.matmul.allow_tf32 == (flag != "highest")
    assert float((G - exact @ exact.T).norm() / G.norm()) < 1e-6
    assert float((pulled - u @ exact).norm() / pulled.norm()) < 1e-6
    assert float((pushed - exact @ d.double()).norm() / pushed.norm()) < 1e-6


@pytest.mark.usefixtures("float32_precision")
def test_flags_are_restored_after_an_error() -> None:
    torch.set_float32_matmul_precision("medium")
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    with pytest.raises(RuntimeError):
        block_linearisation().jvp([torch.zeros(7)])
    assert [backend.fp32_precision for backend in backends] == before


@pytest.mark.usefixtures("float32_precision")
def test_precision_of_the_jacobian_follows_the_flags() -> None:
    """G10: what the flags allow for forming J is known, so that alpha below it can be flagged."""
    linear, conv = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    eps32 = torch.finfo(torch.float32).eps
    torch.set_float32_matmul_precision("highest")
    assert jacobian_eps(linear, torch.float32, cpu) == eps32
    assert jacobian_eps(linear, torch.float32, cuda) == eps32
    # cuDNN's convolutions use TF32 unless told otherwise.
    assert jacobian_eps(conv, torch.float32, cuda) == 3e-4
    assert jacobian_eps(conv, torch.float64, cuda) == torch.finfo(torch.float64).eps
    torch.set_float32_matmul_precision("high")
    assert jacobian_eps(linear, torch.float32, cuda) == 3e-4
    torch.set_float32_matmul_precision("medium")
    assert jacobian_eps(linear, torch.float32, cpu) == 3e-3


def test_small_end_of_the_gram_matrix_survives_the_sum_over_blocks() -> None:
    """A sum in float32 would lose 1 next to 1e8; the blocks' products are summed in float64."""
    blocks = [torch.tensor([[1e4], [0.0]]), torch.tensor([[1.0], [0.0]])]
    assert float(linearisation(blocks).gram()[0, 0, 0]) == 1e8 + 1


def test_half_precision_blocks_are_multiplied_in_float32() -> None:
    block = torch.full((2, 3), 100.0, dtype=torch.float16)
    J = linearisation([block], 1e-3)
    assert torch.equal(J.gram(), torch.full((1, 2, 2), 3e4, dtype=torch.float64))
    assert torch.equal(J.jvp([torch.full((3,), 300.0).half()]), torch.full((2,), 9e4, dtype=torch.float64))
    (pulled,) = vjp(J, J.trained, torch.ones(2, dtype=torch.float64))
    assert torch.equal(pulled, torch.full((3,), 200.0, dtype=torch.float16))


@pytest.mark.parametrize("network", [ResNetFixup, ResNetGN])
def test_float32_step_is_near_the_float64_step(network: type[nn.Module]) -> None:
    """G10: with the paper's alpha in the mean, a float32 step errs by less than 1e-4; G is symmetric."""
    steps = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = network(8, in_channels=1, zero_last_layer=False).to(dtype)
        x = torch.randn(16, 1, 16, 16).to(dtype)
        y = torch.randn(16).to(dtype)
        optimizer = GramGaussNewton(model, lam=1.0, alpha=0.3, damping_convention="mean")
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        info = optimizer.step(lambda model=model, x=x, y=y: model(x) - y)
        assert not info.ill_conditioned
        assert torch.equal(info.gram, info.gram.T)
        assert info.spectrum()[0] >= -1e-6 * info.spectrum()[1]
        steps[dtype] = (nn.utils.parameters_to_vector(model.parameters()).detach() - before).double()
    error = (steps[torch.float32] - steps[torch.float64]).norm() / steps[torch.float64].norm()
    assert float(error) < 1e-4


def spread_out(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a linear model with inputs whose Gram matrix has eigenvalues from 1e-3 to 1e7."""
    generator = torch.Generator().manual_seed(0)
    V, _ = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))
    x = V * torch.logspace(-1.5, 3.5, 16, dtype=torch.float64)
    y = torch.randn(16, 1, generator=generator, dtype=torch.float64)
    return nn.Linear(16, 1, bias=False).to(dtype), x.to(dtype), y.to(dtype)


@pytest.mark.parametrize(("dtype", "flagged"), [(torch.float64, False), (torch.float32, True)])
@pytest.mark.parametrize("alpha", [0.0, 1e-2])
@pytest.mark.filterwarnings("ignore:GramGaussNewton. the small eigenvalues")
def test_wide_spectrum_is_finite_and_flagged_in_float32(
    dtype: torch.dtype, flagged: bool, alpha: float
) -> None:
    """Eigenvalues from 1e-3 to 1e7: float64 resolves them, float32 does not and says so."""
    model, x, y = spread_out(dtype)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=alpha, damping_convention="sum")
    info = optimizer.step(lambda: model(x) - y)
    assert info.ill_conditioned is flagged
    assert bool(torch.isfinite(model.weight).all())
    if not flagged:
        assert info.spectrum() == pytest.approx((1e-3, 1e7), rel=1e-5)


def test_ill_conditioned_warns_once_and_counts_on() -> None:
    model, x, y = spread_out(torch.float32)
    optimizer = GramGaussNewton(model, lam=1.0, alpha=1e-2, damping_convention="sum")
    with pytest.warns(RuntimeWarning, match="small eigenvalues of G") as caught:
        [optimizer.step(lambda: model(x) - y) for _ in range(3)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert optimizer.counts["ill_conditioned"] == 3


class NoFloat64OnMeta(TorchDispatchMode):
    """Fails where an operation makes a float64 tensor on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (result.dtype, result.device.type) == (torch.float64, "meta"):
            raise TypeError("this device has no float64")
        return result


def test_a_device_without_float64_is_served_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """T20: for MPS, G and the solve are on the CPU in float64."""
    assert float64_home(torch.device("mps", 0)) == torch.device("cpu")
    assert float64_home(torch.device("cuda", 0)) == torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="mps has no float64"):
        note_device(torch.device("mps"))

    # torch's meta device replaces it: float64 there is rejected, and only the copy to the CPU fails.
    for module in ("gram", "runtime"):
        monkeypatch.setattr(f"gramgn.optim.{module}.float64_home", lambda _device: torch.device("cpu"))
    J = linearisation([torch.ones(2, 3, device="meta")])
    with NoFloat64OnMeta(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        J.gram()
    with NoFloat64OnMeta():
        (pulled,) = vjp(J, J.trained, torch.ones(2, dtype=torch.float64))
    assert (pulled.device.type, pulled.dtype) == ("meta", torch.float32)


@pytest.mark.parametrize("name", ["cholesky_ex", "eigh", "eigvalsh"])
def test_linear_algebra_is_in_float64_on_the_home_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T20, G10: whatever the dtype of the network, the solve is in float64."""
    seen: list[tuple[torch.dtype, str]] = []
    original = getattr(torch.linalg, name)

    def recording(matrix: Tensor) -> Tensor:
        seen.append((matrix.dtype, matrix.device.type))
        return original(matrix)

    monkeypatch.setattr(torch.linalg, name, recording)
    model, x, y = spread_out(torch.float32)
    # alpha at the border between bounds asks for eigenvalues; alpha = 0 for eigenvectors.
    alpha = {"cholesky_ex": 50.0, "eigh": 0.0, "eigvalsh": 1e7 * torch.finfo(torch.float32).eps * 1.01}[name]
    optimizer = GramGaussNewton(model, lam=1.0, alpha=alpha, damping_convention="sum")
    optimizer.counts["ill_conditioned"] = 1  # the warning is not what this is about
    optimizer.step(lambda: model(x) - y)
    assert seen == [(torch.float64, "cpu")] * len(seen)
    assert seen
