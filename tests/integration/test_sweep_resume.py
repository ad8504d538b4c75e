"""The same command again: what is kept, what is resumed, what is rejected; what records and status show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from house import SMALL, Call, House, read_rows, read_run
from sweeps import MULTI, cell, contents, edit_run, states, sweep_of, times

pytestmark = pytest.mark.timeout(180)
MORE = ("optimizer=sgd", "trainer.epochs=1", "name=triple")
RATES = "optimizer.lr=0.01,0.02,1e30"
SCRIPT = "scripts/sweep_status.py"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> House:
    """Return a house with a finished sweep, for reading: two jobs are done, one diverged."""
    house = House(tmp_path_factory.mktemp("done") / "house")
    result = house.run(*MULTI, *SMALL, *MORE, RATES)
    assert result.returncode == 0, result.stderr
    return house


@pytest.fixture
def triple(done: House, house: House) -> Path:
    """Return a copy of the finished sweep in the test's own house, where its command finds it again."""
    place = house.root / "outputs" / "sweeps" / "triple"
    shutil.copytree(sweep_of(done).path, place)
    return place


def test_the_record_of_a_sweep(done: House) -> None:
    """H32: all overrides are in a file; no path of the machine is."""
    record = sweep_of(done).read()
    assert record["axes"] == {"optimizer.lr": ["0.01", "0.02", "1e+30"]}
    assert RATES in record["command"]
    assert len(record["starts"]) == 1
    assert record["starts"][0]["versions"]["torch"]
    assert states(done) == [entry["state"] for entry in record["cells"]] == ["done", "done", "diverged"]
    for entry in record["cells"]:
        folder = sweep_of(done).path / entry["folder"]
        assert entry["exit_code"] == {"done": 0, "diverged": 3}[entry["state"]]
        assert entry["started"] <= entry["ended"]
        assert read_run(folder)["group"] == "triple"
        assert entry["overrides"] == read_run(folder)["overrides"]
    assert str(done.root) not in json.dumps(record)


def test_the_status_of_sweeps(done: House) -> None:
    """Without names each sweep has a line; as JSON for programs; nothing heavy is imported."""
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path('scripts/sweep_status.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'hydra', 'wandb', 'numpy', 'pandas'} & set(sys.modules)"
    )
    result = done.script("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["triple: 3 jobs: 2 done, 1 diverged"]
    (content,) = json.loads(done.script(SCRIPT, "triple", "--json").stdout)
    assert content["active"] is False
    assert content["states"] == {"diverged": 1, "done": 2}
    assert content["cells"][0]["epoch"] == 1
    wrong = done.script(SCRIPT, "tripel")
    assert wrong.returncode == 2
    assert "did you mean 'triple'" in wrong.stderr
    assert wrong.stderr.count("error:") == 1


def test_the_status_of_damaged_sweeps(house: House) -> None:
    """Each is read for itself; the exit code reports that one could not be."""
    sweeps = house.root / "outputs" / "sweeps"
    for name, text in (("bad", ""), ("good", '{"format": 1, "cells": []}')):
        (sweeps / name).mkdir(parents=True)
        (sweeps / name / "sweep.json").write_text(text)
    result = house.script(SCRIPT)
    assert (result.returncode, result.stdout.strip()) == (2, "good: 0 jobs:")
    assert "Remove it and repeat the sweep's command" in result.stderr
    shutil.rmtree(sweeps)
    nothing = house.script(SCRIPT)
    assert (nothing.returncode, nothing.stdout.startswith("there are no sweeps in")) == (0, True)


def test_nothing_finished_is_touched(
    triple: Path, call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H08: done and diverged cells keep time and content and are reported; also in a folder that was renamed."""
    for name in ("triple", "renamed"):
        place = triple.rename(triple.with_name(name))
        files, written = contents(place), times(place)
        overrides = (*SMALL, *MORE[:2], f"name={name}", RATES, "hydra.launcher.n_jobs=2")
        assert call(*overrides, multirun=True) == 0
        err = capsys.readouterr().err
        assert "kept: 3 of 3 jobs, finished already" in err
        assert [line.split()[2] for line in err.splitlines()[-3:]] == ["kept"] * 3
        assert contents(place) == files
        assert times(place) == written
        triple = place


def test_a_longer_axis_adds_cells(triple: Path, call: Call, house: House) -> None:
    """H08: cells are found again when the sweep varies more."""
    first = cell(house, "optimizer.lr=0.01", "triple").folder
    before = times(first)
    assert call(*SMALL, *MORE, "optimizer.lr=choice(1e-2,0.04)", multirun=True) == 0
    assert states(house, "triple") == ["done", "done", "done", "diverged"]
    assert times(first) == before


def test_another_configuration_is_rejected(
    triple: Path, call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H08: with the keys that differ; nothing is overwritten, the missing cell is run; other code is counted."""
    other, missing, _ = (each.folder for each in sweep_of(house, "triple").cells())
    config = read_run(other)["config"]
    edit_run(other, config={**config, "optimizer": {**config["optimizer"], "momentum": 0.5}})
    diverged = cell(house, "optimizer.lr=1e+30", "triple").folder
    edit_run(diverged, starts=[{"git": {"commit": "1234567890abcdef", "diff_sha256": "fedcba98"}}])
    shutil.rmtree(missing)
    before = contents(other)
    assert call(*SMALL, *MORE, RATES, multirun=True) == 1
    err = capsys.readouterr().err
    assert "optimizer.momentum (0.5 then, 0.9 now)" in err
    assert "rejected" in err.split("jobs in")[1]
    assert "mixed code versions in this sweep: 1 with 1234567890+fedcba" in err
    assert contents(other) == before
    assert states(house, "triple") == ["done", "done", "diverged"]
    assert call(*SMALL, *MORE, "optimizer.lr=0.01", multirun=True) == 2
    assert contents(other) == before


def test_what_changes_no_result_may_change(triple: Path, call: Call, house: House) -> None:
    """A run that was interrupted is resumed with other threads, and stays the cell it is."""
    folder = cell(house, "optimizer.lr=0.01", "triple").folder
    edit_run(folder, state="interrupted")
    assert call(*SMALL, *MORE, RATES, "trainer.threads=1", multirun=True) == 0
    assert len(house.runs()) == 3
    assert read_run(folder)["resume_count"] == 1
    assert [row["epoch"] for row in read_rows(folder)] == ["1"]


def test_a_lost_sweep_json_is_rebuilt(triple: Path, call: Call, house: House) -> None:
    """Also when no job is left to be run, as the message about a damaged one promises."""
    file = sweep_of(house, "triple").sweep_json
    before = {name: data for name, data in contents(triple).items() if name != file.name}
    file.write_text("")
    assert call(*SMALL, *MORE, RATES, multirun=True) == 2
    file.unlink()
    assert call(*SMALL, *MORE, RATES, multirun=True) == 0
    assert states(house, "triple") == ["done", "done", "diverged"]
    assert {name: data for name, data in contents(triple).items() if name != file.name} == before


def test_a_failed_cell_is_tried_again(call: Call, house: House) -> None:
    """A job that failed before its first epoch starts again, also with a mended configuration; its log stays."""
    command = (*SMALL, "trainer.epochs=1", "dataset.bad=memory")
    assert call(*command, multirun=True) == 1
    (folder,) = house.runs()
    config = read_run(folder)["config"]
    edit_run(folder, config={**config, "optimizer": {**config["optimizer"], "lam": 7.0}})
    assert call(*command, multirun=True) == 1
    assert read_run(folder)["config"]["optimizer"]["lam"] == 1.0
    assert (folder / "output.log").read_text().count("MemoryError:") == 2
    assert house.runs() == [folder]
