"""The examples on several processes take the steps of one process. Run where the launcher is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gramgn.optim import GramGaussNewton

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
LAUNCHERS = {
    "torchrun": "torch",
    "fabric": "lightning",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "ray": "ray",
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_examples_take_the_steps_of_one_process(
    name: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(LAUNCHERS[name], reason=f"needs pip install {LAUNCHERS[name]}")
    folder = repository / "examples" / "ranks"
    started_by = TORCHRUN if name in ("torchrun", "accelerate") else ()
    path = os.pathsep.join([str(repository / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, *started_by, str(folder / f"with_{name}.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    # Not the return code: gloo (torch 2.14) sometimes crashes at exit, after everything was done.
    lines = re.findall(r"epoch (\d): loss (\S+) of 64 samples", result.stdout + result.stderr)
    losses = list({epoch: float(loss) for epoch, loss in lines}.values())
    assert len(losses) == 3, result.stdout + result.stderr
    if name == "lightning":  # which shuffles
        assert losses[-1] < losses[0] < 1e-2
        return

    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(folder)
    import problem

    torch.manual_seed(0)
    model = problem.network()
    optimizer = GramGaussNewton(model, lam=1.0, alpha=0.01)
    x, y = problem.loader().dataset.tensors
    for epoch in range(problem.EPOCHS):
        for batch in torch.arange(len(x)).split(problem.BATCH):
            info = optimizer.step(lambda batch=batch: model(x[batch]) - y[batch])
        assert losses[epoch] == pytest.approx(info.loss, rel=1e-10)
