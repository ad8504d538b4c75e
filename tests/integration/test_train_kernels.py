"""Runs name the compiled kernels of their optimizer, and a resumed run keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from house import SMALL, Call, House, losses, read_run

from gramgn.optim import kernels
from gramgn.records import runs

FORMS = kernels.available()
OPTIONS = (*SMALL, "model._target_=outside_formats.DeepNet", "optimizer=ggn", "trainer.batch_size=9")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)


@pytest.mark.parametrize("form", [*FORMS, "off"])
def test_a_resumed_run_keeps_its_kernels(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """T02: also where the machine would choose others: the state in the checkpoint names them."""
    assert call(*OPTIONS, f"optimizer.engine.kernels={form}", "trainer.epochs=3") == 0
    assert call(*OPTIONS, f"optimizer.engine.kernels={form}", "trainer.epochs=1") == 0
    assert f", kernels {form}" in capsys.readouterr().err
    whole, part = house.runs()
    assert read_run(part)["kernels"] == form
    chosen = read_run(part)["engine"]
    assert (chosen["name"], chosen["kernels"]) == ("stream", form)
    assert chosen["backend"] in ("blas", "onednn")
    change_kernels(part, "auto")
    assert call(f"resume={part}", "trainer.epochs=3") == 0
    assert losses(whole) == losses(part)
    one, other = (torch.load(folder / "checkpoints" / "last.pt")["model"] for folder in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_run(part)["kernels"] == form
    assert set(runs(house.root / "outputs").kernels) == {form}


@pytest.mark.skipif(not FORMS, reason=str(kernels.missing()))
def test_a_run_whose_kernels_are_missing_is_resumed_with_others(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine a run can be continued; what it began with and what it went on with are recorded."""
    form = FORMS[-1]
    assert call(*OPTIONS, f"optimizer.engine.kernels={form}", "trainer.epochs=1") == 0
    (folder,) = house.runs()
    monkeypatch.setattr(kernels, "available", lambda: ())
    monkeypatch.setattr(kernels, "missing", lambda: "the compiled kernels are not built")
    with pytest.warns(RuntimeWarning, match=f"saved with kernels='{form}', and continues with 'off'"):
        assert call(f"resume={folder}", "trainer.epochs=2") == 0
    assert read_run(folder)["kernels"] == f"{form} then off"
    assert ", kernels off\nnote: the compiled kernels are not built\nrun folder: " in capsys.readouterr().err
    assert call(*OPTIONS, "optimizer.engine=vmap", "trainer.epochs=1") == 0
    assert ", kernels" not in capsys.readouterr().err
    assert call(*OPTIONS, f"optimizer.engine.kernels={form}") == 2
    assert f"kernels='{form}': " in capsys.readouterr().err


def test_the_environment_switches_kernels_off(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert call(*OPTIONS, "trainer.epochs=1") == 0
    (folder,) = house.runs()
    assert read_run(folder)["kernels"] == "off"
    assert call(*SMALL, "optimizer=sgd", "trainer.epochs=1") == 0
    assert "kernels" not in read_run(house.runs()[1])
    assert runs(house.root / "outputs").kernels.isna().sum() == 1
    monkeypatch.setenv(kernels.VARIABLE, "fast")
    before = house.files()
    capsys.readouterr()
    assert call(*OPTIONS) == 2
    assert "GRAMGN_KERNELS must be 0 (no kernels), 1 (the widest form) or one of" in capsys.readouterr().err
    assert house.files() == before


def change_kernels(folder: Path, choice: str) -> None:
    """Change the option in run.json, which no checkpoint depends on."""
    record = read_run(folder)
    record["config"]["optimizer"]["engine"]["kernels"] = choice
    (folder / "run.json").write_text(json.dumps(record))
