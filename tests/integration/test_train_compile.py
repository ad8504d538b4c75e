"""trainer.compile (G19): matches eager to 1e-4, or is rejected in one message before any work."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator

import pytest
import torch
from house import BLOBS, SMALL, Call, House, losses, read_rows
from torch import Tensor, nn

from gramgn.training import Stepper

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")),
    reason="torch.compile needs a C++ compiler on the CPU: neither g++ nor clang++ is here",
)
DEEP = (*SMALL, "model._target_=outside_formats.DeepNet")


@pytest.fixture(scope="module", autouse=True)
def _compiled_code_is_kept_for_this_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the tests of this file: the first of them compiles for half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 1), nn.Flatten(start_dim=0))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(b, 3, 9, 9, generator=generator), torch.randn(b, generator=generator))
        for b in (6, 6, 4, 6, 4)
    ]


@needs_compiler
@pytest.mark.timeout(300)
def test_compiled_steps_match_eager() -> None:
    """Two shapes of batch: compiled beforehand and not again; state_dict has the network's own names."""
    from torch._dynamo.utils import counters

    eager = network()
    compiled = copy.deepcopy(eager)
    reference = Stepper(eager, torch.optim.AdamW(eager.parameters(), lr=0.01))
    stepper = Stepper(compiled, torch.optim.AdamW(compiled.parameters(), lr=0.01), compile=True)
    random = torch.get_rng_state()
    stepper.prepare(iter(batches()[1:3]))
    assert torch.equal(random, torch.get_rng_state())
    for name, value in eager.state_dict().items():  # running statistics included
        assert torch.equal(value, compiled.state_dict()[name]), name
    assert all(parameter.grad is None for parameter in compiled.parameters())
    graphs = counters["stats"]["unique_graphs"]
    assert graphs >= 2
    for inputs, targets in batches():
        one, other = reference(inputs, targets), stepper(inputs, targets)
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.timeout(300)
def test_a_compiled_run_matches_and_resumes(call: Call, house: House) -> None:
    """Every loss within 1e-4 of the eager run; stopped and resumed it is the same run bit for bit."""
    options = (*DEEP, "optimizer=sgd", "trainer.batch_size=8")
    assert call(*options) == 0
    assert call(*options, "trainer.compile=true") == 0
    assert call(*options, "trainer.compile=true", "trainer.epochs=1") == 0
    eager, compiled, part = house.runs()
    for one, other in zip(read_rows(eager), read_rows(compiled), strict=True):
        for column in ("train_loss", "val_loss", "test_loss", "grad_norm"):
            assert float(other[column]) == pytest.approx(float(one[column]), rel=1e-4)
    assert call(f"resume={part}", "trainer.epochs=2") == 0
    assert losses(part) == losses(compiled)
    states = [torch.load(folder / "checkpoints" / "last.pt")["model"] for folder in (eager, compiled)]
    assert list(states[0]) == list(states[1])


def test_ggn_is_rejected_before_any_work(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    before = house.files()
    assert call(*SMALL, "optimizer=ggn", "trainer.device=cpu", "trainer.compile=true") == 2
    message = capsys.readouterr().err
    assert "GramGaussNewton runs uncompiled on cpu; on CUDA it uses CUDA graphs" in message
    assert "trainer.compile=false" in message
    assert message.count("error:") == 1
    assert house.files() == before


@pytest.mark.timeout(300)
def test_a_missing_compiler_is_reported(house: House) -> None:
    """One message, exit code 2, no run folder."""
    nowhere = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(house.root / "inductor")}
    done = house.run(*BLOBS, *SMALL, "optimizer=sgd", "trainer.device=cpu", "trainer.compile=true", **nowhere)
    assert done.returncode == 2, done.stderr
    assert "trainer.compile=true, but torch.compile fails here" in done.stderr
    assert "needs a C++ compiler" in done.stderr
    assert "Traceback" not in done.stderr
    assert not house.runs()
