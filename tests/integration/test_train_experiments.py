"""Experiments on the command line: what is recorded of the choice, and starting from the network of another run."""

from __future__ import annotations

import pytest
from house import SMALL, Call, House, read_run

FACES = ("experiment=fig1/afad_ggn_fixup", *SMALL, "trainer.epochs=1")
HANDS = ("experiment=fig1/rsna_ggn_fixup", *SMALL, "trainer.epochs=1", "warm_start.dataset=blobs")


def test_the_choice_is_recorded_and_absent_where_there_is_none(call: Call, house: House) -> None:
    assert call(*FACES) == 0
    assert call(*SMALL, "trainer.epochs=1") == 0
    with_choice, without = (read_run(folder)["choices"] for folder in house.runs())
    assert with_choice["experiment"] == "fig1/afad_ggn_fixup"
    assert "sweep" not in with_choice
    assert {"experiment", "sweep"}.isdisjoint(without)


def test_an_experiment_starts_from_the_run_it_names(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*FACES, "seed=1") == 0
    assert call(*FACES, "seed=2") == 0
    capsys.readouterr()
    assert call(*HANDS, "seed=2") == 0
    first, second, third = house.runs()
    source = second.relative_to(house.root).as_posix()
    assert read_run(third)["init_from"] == source
    assert f"starting from {source}, fig1/afad_ggn_fixup of seed 2 on blobs" in capsys.readouterr().err
    assert read_run(first)["init_from"] is None


def test_without_a_run_to_start_from_one_message(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    before = house.files()
    assert call(*HANDS) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    assert "python train.py experiment=fig1/afad_ggn_fixup dataset=blobs trainer=debug seed=0" in message
    assert "Traceback" not in message
    assert "raised while resolving" not in message
    assert house.files() == before


def test_a_diverged_run_to_start_from_is_one_message(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*FACES, "optimizer.alpha=1e-12", "optimizer.lam=1e-12") == 3
    assert call(*HANDS) == 2
    assert "diverged" in capsys.readouterr().err.split("error:")[1]
    assert len(house.runs()) == 1


def test_a_named_sweep(call: Call, house: House) -> None:
    """`hydra.mode` in the file makes it one, without -m; an axis on the command line replaces the file's."""
    assert call(*SMALL, "sweep=seeds", "seed=4,5", "trainer.epochs=1", "name=two") == 0
    runs = [read_run(folder) for folder in house.runs("outputs/sweeps/two")]
    assert sorted(run["seed"] for run in runs) == [4, 5]
    assert {run["choices"]["sweep"] for run in runs} == {"seeds"}
