"""The theory through train.py: both experiments, vector data, what is recorded, and what is rejected."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from house import Call, House, losses, read_rows, read_run
from trained_runs import tool

from gramgn.data import Sphere
from gramgn.models import TwoLayer
from gramgn.theory import contraction, follow, gram, last_order, linear_residuals, split

OWN = ("tracking=none", "trainer.device=cpu")


def norms(folder: Path, n: int = 100) -> list[float]:
    """Return |f - y| at the start and after each epoch, from metrics.csv."""
    rows = [row for row in read_rows(folder) if row["epoch"] != "0"]
    after = [float(row["train_eval_loss"]) for row in rows]
    return [math.sqrt(n * value) for value in (float(rows[0]["train_loss"]), *after)]


def same_problem(width: int = 256) -> tuple[TwoLayer, torch.Tensor, torch.Tensor]:
    """Return the network that seed=0 starts from, and the training data."""
    data = Sphere().load(0)
    rows = data.split == "train"
    torch.manual_seed(0)
    model = TwoLayer(20, width=width).double()
    return model, torch.from_numpy(data.images[rows]), torch.from_numpy(data.targets[rows])


def test_quadratic(call: Call, house: House) -> None:
    """Theorem 1 in the ordinary pipeline: order 2, and to rounding the numbers of gramgn.theory."""
    assert call("experiment=theory/quadratic", "model.width=256", *OWN) == 0
    (folder,) = house.runs()
    found = norms(folder)
    assert last_order(found) == pytest.approx(2.0, abs=0.15)
    model, x, y = same_problem()
    path = follow(model, x, y, num_epochs=4)
    assert found[:5] == pytest.approx(path.residuals, rel=1e-6, abs=1e-12)
    rows = read_rows(folder)
    for name in ("residual", "distance", "drift_J", "drift_J_row", "drift_G"):
        measured = [float(row[name]) for row in rows[:5]]
        assert measured == pytest.approx([getattr(point, name) for point in path.points], rel=1e-6, abs=1e-11)
    assert read_run(folder)["theory"]["rho"] == 0
    run = read_run(folder)
    assert (run["state"], run["choices"]["experiment"]) == ("done", "theory/quadratic")
    assert (run["dataset"]["kind"], run["dataset"]["image_size"]) == ("synthetic", None)
    assert (run["precision"]["dtype"], run["config"]["trainer"]["order"]) == ("float64", "cyclic")
    assert all(row["solve_minimum_norm"] == "1" and row["step"] == row["epoch"] for row in rows[1:])


def test_another_optimizer_in_its_place(call: Call, house: House) -> None:
    """The experiment's alpha = 0 is GGN's alone: any optimizer can be put in its place, and lambda, alpha changed."""
    words = ("experiment=theory/cyclic", "trainer.epochs=1", "model.width=32", *OWN)
    for more in ((), ("optimizer=sgd",), ("optimizer.lam=2", "optimizer.alpha=0.1")):
        assert call(*words, *more) == 0
    plain, sgd, damped = (read_run(folder)["config"]["optimizer"] for folder in house.runs())
    assert (plain["lam"], plain["alpha"]) == (1.0, 0.0)
    assert "alpha" not in sgd
    assert (damped["lam"], damped["alpha"]) == (2.0, 0.1)


def test_cyclic(call: Call, house: House) -> None:
    """Theorem 2: the run contracts as A = L^T (D - L)^-1 of its own initialisation does; 30 does not divide 100."""
    words = ("experiment=theory/cyclic", "model.width=2048", "trainer.batch_size=30", *OWN)
    assert call(*words) == 0
    (folder,) = house.runs()
    rows = read_rows(folder)
    assert [row["step"] for row in rows] == [str(4 * epoch) for epoch in range(31)]
    model, x, y = same_problem(2048)
    r = (model(x) - y).detach()
    predicted = linear_residuals(split(gram(model, x), 30), r, 30)
    measured = [float(r.norm()), *norms(folder)[1:]]
    assert contraction(measured) == pytest.approx(contraction(predicted), rel=0.01)
    assert measured[-1] < 0.05 * measured[0]


def test_batches_and_order_decide(call: Call, house: House) -> None:
    """The same run in random order is another one; batch_size=full is one batch of all."""
    words = ("experiment=theory/cyclic", "model.width=64", "trainer.epochs=2", *OWN)
    for more in ((), ("trainer.order=shuffle",), ("trainer.batch_size=full",), ("trainer.batch_size=100",)):
        assert call(*words, *more) == 0
    cyclic, shuffle, full, hundred = (losses(folder) for folder in house.runs())
    assert cyclic != shuffle
    assert full == hundred
    assert full[1]["step"] == "1"


def test_resuming_on_vectors_changes_nothing(call: Call, house: House) -> None:
    words = ("dataset=sphere", "model=two_layer", "optimizer=ggn", "trainer.batch_size=32", *OWN)
    assert call(*words, "trainer.epochs=3") == 0
    assert call(*words, "trainer.epochs=1") == 0
    whole, part = house.runs()
    assert call(f"resume={part}", "trainer.epochs=3") == 0
    assert losses(whole) == losses(part)


def test_digits(call: Call, house: House) -> None:
    """Real vectors, n no multiple of b, damped."""
    pytest.importorskip("sklearn", reason="needs the extra theory: pip install -e .[theory]")
    words = ("dataset=digits", "model=two_layer", "model.width=512", "trainer.epochs=3", *OWN)
    assert call(*words, "optimizer.alpha=0.01", "trainer.dtype=float64") == 0
    (folder,) = house.runs()
    run, rows = read_run(folder), read_rows(folder)
    assert run["dataset"]["kind"] == "real"
    assert float(rows[-1]["train_loss"]) < 0.6 * float(rows[0]["train_loss"])


def test_vectors_and_images_do_not_mix(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """Vectors and networks for images do not go together, whichever is chosen; nothing is written."""
    before = house.files()
    cases = {
        ("dataset=sphere",): ("inputs of shape [2, 20]", "ResNetFixup takes images"),
        ("model=two_layer", "dataset=blobs", "trainer=debug"): (
            "no fixed number of features",
            "dataset=sphere",
        ),
        ("model=two_layer", "dataset=blobs", "trainer=debug", "model.in_features=3"): (
            "images of shape [2, 3,",
            "[b, 3]",
        ),
        ("model=two_layer", "dataset=sphere", "model.in_features=3"): (
            "inputs of shape [2, 20]",
            "in_features",
        ),
        ("model=two_layer", "dataset=sphere", "dataset.dim=1"): ("dataset.dim=1", "at least 2"),
        ("model=two_layer", "dataset=sphere", "dataset.targets=x"): ("dataset.targets='x'",),
        ("model=two_layer", "dataset=sphere", "model.activation=elu"): ("activation must be one of", "relu"),
    }
    for words, expected in cases.items():
        assert call(*words, *OWN) == 2
        message = capsys.readouterr().err
        assert message.count("error:") == 1
        assert "Traceback" not in message
        for part in expected:
            assert part in message
    assert house.files() == before


def test_warnings_of_one_line_each(house: House) -> None:
    """ReLU has a kink, and M d = 40 weights cannot fit 100 points: the minimum-norm step is taken."""
    words = (
        "experiment=theory/quadratic",
        "model.width=2",
        "model.activation=relu",
        "trainer.epochs=2",
        *OWN,
    )
    done = house.run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: activation=relu has no continuous derivative") == 1
    assert "two_layer.py" not in done.stderr
    assert done.stderr.count("warning: GramGaussNewton: the small eigenvalues of G") == 1
    (folder,) = house.runs()
    assert np.isfinite(norms(folder)).all()


def test_tools_on_vectors(
    call: Call, house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of a float64 run are used and exported to the last bit; the card's snippet runs."""
    words = ("experiment=theory/quadratic", "model.width=256", "trainer.epochs=4", *OWN)
    assert call(*words) == 0
    (run,) = house.runs()
    capsys.readouterr()
    assert tool(house, "evaluate", f"run={run}", "split=train", "checkpoint=last", "format=json") == 0
    recorded = float(read_rows(run)[-1]["train_eval_loss"])
    assert recorded < 1e-20  # float32 weights would give 1e-15
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(recorded, rel=0.5)
    out = tmp_path / "exported"
    assert tool(house, "export", f"run={run}", f"out={out}", "checkpoint=last") == 0
    kept = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]
    weights = torch.load(out / "weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    card = (out / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "a vector of 20 numbers" in card
    assert "image" not in card.split("## Training")[0]
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", code], cwd=out, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_nothing_to_prepare(house: House) -> None:
    done = house.script("scripts/prepare_data.py", "dataset=sphere")
    assert done.returncode == 2
    assert "needs no preparation" in done.stderr
